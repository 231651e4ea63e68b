"""Memory, time and cost of a whole run, from its config and a number of GPUs; nothing is started.

`make_summary` needs no GPU to be named: `--dry-run` prints it. `make_plan` adds memory against a GPU's
capacity, communication and time on a named cluster, for every length bucket.
"""

import os
from dataclasses import dataclass, replace

import numpy as np

from titan_tts.plan.activations import ActivationMemory
from titan_tts.plan.devices import Cluster, check_device
from titan_tts.plan.planner import Batches, Planner, Step, Summary
from titan_tts.plan.step_time import Factor, Interval, rate, scaled, with_error
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.batch_split import accumulation_steps
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.batch_ramp import batch_ramp
from torchtitan.models.dit_tts.data.buckets import BatchPolicy
from torchtitan.models.dit_tts.data.build import open_training_data, sample_draws, training_samples
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy, batch_policy
from torchtitan.models.dit_tts.data.storage import find_shards, sidecar_path
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.run.benchmark.synthetic import synthetic_data


@dataclass(frozen=True)
class Plan:
    """A config on a cluster, as `titan-tts plan` prints it. Means and the whole run are for lengths of [benchmark]."""

    summary: Summary
    cluster: Cluster
    factor: Factor
    longest: Step
    peak_bucket: Step
    """of all buckets, the one that needs the most memory"""

    largest: int
    """local_batch_size with which every bucket fits"""

    buckets: list[Step]
    mean_seconds: Interval
    mean_mfu: Interval
    global_batches: float
    """complete ones of all steps; fewer than steps where there is a batch ramp"""

    warmup_batches: float
    hours_per_step: float
    """of audio without padding, in the mean over complete steps"""

    gpu_hours: Interval
    """without validation, checkpoints and restarts"""

    cost: Interval | None


def _hours_per_step(policy: BatchPolicy, frames_per_second: float) -> float:
    """Of audio without padding, in the mean over the steps."""
    counts, sizes = np.array(policy.sample_counts), np.array(policy.batch_sizes)
    frames = policy.useful_fraction * (counts * [shape[0] for shape in policy.shapes]).sum()
    return float(frames / (counts / sizes).sum() / frames_per_second / 3600)


def estimated_buckets(config: JobConfig, ranks: int) -> list[tuple[float, Batches]]:
    """(fraction of the steps, batches) of each length bucket, shortest first; packed batches are one. Raises
    as `synthetic_data`."""
    return _buckets(synthetic_data(config, ranks)[1], ranks, accumulation_steps(config, ranks))


def _buckets(policy: BatchPolicy, ranks: int, accumulation: int) -> list[tuple[float, Batches]]:
    per_step = ranks * accumulation
    if isinstance(policy, PackedPolicy):
        # As samples of the mean length: their attention, a few hundredths of the FLOPs, is too small by a third.
        streams = np.array(policy.shapes[0]) * (policy.batch_sizes[0] // per_step)
        samples = max(1, round(streams[0] * policy.useful_fraction / policy.lengths[:, 0].mean()))
        return [(1.0, Batches(Lengths(*(-(-streams // samples)).tolist()), samples, accumulation))]
    steps = [n / size for n, size in zip(policy.sample_counts, policy.batch_sizes)]
    return [
        (number / sum(steps), Batches(Lengths(*shape), size // per_step, accumulation))
        for shape, size, number in zip(policy.shapes, policy.batch_sizes, steps, strict=True)
        if number
    ]


def make_summary(config: JobConfig, gpus: int) -> tuple[Summary, ActivationMemory]:
    """(the summary, activations of an eager micro-batch of the longest bucket)."""
    validate_config(config, gpus, list(model_flavors()))
    planner = Planner(config, gpus)
    summary, longest = planner.summary(), planner.longest
    # Compiling blocks takes most of a plan's time.
    eager = replace(planner.config, compile=replace(planner.config.compile, enable=False))
    activations, _ = planner.activations.measured(
        eager, summary.layout.sharded, longest.micro_batch, longest.lengths
    )
    return replace(summary, data_hours_per_step=_data_hours_per_step(planner.config)), activations


def _data_hours_per_step(config: JobConfig) -> float | None:
    data = config.data
    paths = [data.path] if isinstance(data.path, str) else data.path
    try:
        shards = (
            [] if any(map(is_remote, paths)) else [each for p in paths for each in find_shards(p)]
        )
    except InputError:
        return None
    if not shards or not all(os.path.exists(sidecar_path(each)) for each in shards):
        return None
    dataset = open_training_data(data)
    # At least as many as with any encoder: no sample is left out for its text, which is not read.
    tokens = np.minimum(dataset.text_bytes + 2, data.max_text_tokens)
    selection = training_samples(data, dataset, tokens)
    lengths = dataset.reference_frames[selection.samples], tokens[selection.samples]
    draws = sample_draws(data, dataset, selection)
    size = config.training.global_batch_size
    policy = batch_policy(data, size, selection.frames, *lengths, draws)
    return _hours_per_step(policy, data.frames_per_second)


def make_plan(config: JobConfig, cluster: Cluster, factor: Factor, price: float = 0.0) -> Plan:
    """price: of one GPU for an hour; 0: not known."""
    check_device(config, cluster.device)
    planner = Planner(config, cluster.gpus)
    config, longest, device = planner.config, planner.longest, cluster.device
    step = planner.step(config, cluster, factor, longest)
    largest = planner.largest(config, device, longest)
    step = replace(step, largest=largest)
    buckets = []
    _, policy = synthetic_data(config, planner.ranks)
    for fraction, batches in _buckets(policy, planner.ranks, longest.accumulation):
        fits = planner.largest(config, device, batches)
        each = planner.step(config, cluster, factor, batches)
        buckets.append(replace(each, fraction=fraction, largest=fits))
        # Every bucket's micro-batch is in proportion to the longest's.
        largest = min(largest, fits * longest.micro_batch // batches.micro_batch)
    if config.data.batching == "packed":  # whole rows
        largest -= largest % config.data.longest_per_row
    seconds = sum(each.fraction * each.seconds.estimate for each in buckets)
    flops = sum(each.fraction * each.flops for each in buckets)
    mean = with_error(seconds, factor)
    ramp = batch_ramp(config.training)
    complete = ramp.global_batches(config.training.steps)
    gpu_hours = scaled(mean, complete * cluster.gpus / 3600)
    return Plan(
        summary=planner.summary(),
        cluster=cluster,
        factor=factor,
        longest=step,
        peak_bucket=max([step, *buckets], key=lambda each: each.memory.total),
        largest=largest,
        buckets=buckets,
        mean_seconds=mean,
        mean_mfu=rate(flops / cluster.gpus / device.peak_flops, mean),
        global_batches=complete,
        warmup_batches=ramp.global_batches(config.lr_scheduler.warmup_steps),
        hours_per_step=_hours_per_step(policy, config.data.frames_per_second),
        gpu_hours=gpu_hours,
        cost=scaled(gpu_hours, price) if price else None,
    )
