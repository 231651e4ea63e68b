"""The forecast of a config on a number of GPUs: one step, a whole run, and every layout of the same GPUs."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Any

import numpy as np

from titan_tts.plan.devices import ACCELERATOR, Cluster
from titan_tts.plan.memory import (
    Layout,
    activation_bytes,
    capacity,
    encoder_bytes,
    lasting_bytes,
    passing_bytes,
)
from titan_tts.plan.parameters import Model, describe_model
from titan_tts.plan.step_time import (
    Batches,
    Transfer,
    communication,
    exposed_seconds,
    micro_batch_seconds,
    model_flops,
    optimizer_seconds,
)
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.batch_split import accumulation_steps
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.compile import blocks_compiled
from torchtitan.models.dit_tts.infra.parallelize import reshards
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.run.benchmark.synthetic import synthetic_data

WAITS = "waits for the host"
MAX_BATCH = 4096
Settings = dict[str, dict[str, Any]]
"""section -> key -> value"""


@dataclass(frozen=True)
class Forecast:
    """An optimizer step. `memory`: bytes of one GPU by part, an upper bound, as not all are largest at once; `time`:
    seconds by part; `flops`: of all ranks, nothing repeated."""

    layout: Layout
    cluster: Cluster
    batches: Batches
    memory: dict[str, int]
    offloaded: int
    time: dict[str, float]
    transfers: list[Transfer]
    flops: int

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= capacity(self.cluster.device)

    @property
    def seconds(self) -> float:
        return sum(self.time.values())

    @property
    def seconds_without_waits(self) -> float:
        return self.seconds - self.time[WAITS]

    @property
    def samples(self) -> int:
        """Number of samples of a step, on all ranks."""
        return self.layout.ranks * self.batches.micro_batch * self.batches.accumulation

    def mfu(self, seconds: float) -> float:
        """Exact FLOPs over the dense bf16 peak, also in fp8."""
        return self.flops / self.layout.gpus / self.cluster.device.peak_flops / seconds


class Planner:
    """Forecasts for configs with the same model on a cluster."""

    def __init__(self, config: JobConfig, cluster: Cluster, model: Model | None = None):
        self.ranks = Layout.of(config, cluster.gpus).ranks
        device = replace(cluster.device, peak_tflops=config.metrics.peak_tflops)
        self.cluster = replace(cluster, device=device)
        self.config = upstream_view(config, run_folder_path(config), self.ranks)
        self.model = model or describe_model(self.config)

    def longest(self) -> Batches:
        return longest_batches(self.config, self.ranks)

    def step(self, batches: Batches, config: JobConfig | None = None) -> Forecast:
        config, model, cluster = config or self.config, self.model, self.cluster
        layout = Layout.of(config, cluster.gpus)
        samples, lengths, times = batches.micro_batch, batches.lengths, batches.accumulation
        lasting = lasting_bytes(config, model, layout)
        offloaded = config.training.enable_cpu_offload and layout.sharded
        memory = {} if offloaded else dict(lasting)
        memory |= passing_bytes(config, model, layout, times)
        memory |= encoder_bytes(config, model)
        if model.args.teacher_passes:
            gathered = memory.get("gathered weights", 0)
            memory["teacher"] = (0 if offloaded else lasting["weights"]) + gathered
        memory |= activation_bytes(config, model.args, layout.tensor, samples, lengths)
        each = micro_batch_seconds(config, model, cluster.device, layout.tensor, samples, lengths)
        time = {name: times * seconds for name, seconds in each.items()}
        transfers, first = communication(config, model, layout, cluster, batches)
        computing = sum(time.values()) - time[WAITS]
        time["optimizer"] = optimizer_seconds(config, model, cluster.device, layout)
        time["exposed communication"] = exposed_seconds(transfers, first, computing, times)
        flops = layout.ranks * times * samples * model_flops(model, lengths)
        outside = sum(lasting.values()) if offloaded else 0
        return Forecast(layout, cluster, batches, memory, outside, time, transfers, flops)

    def largest(self, batches: Batches) -> int:
        """The largest micro-batch of this shape that fits."""

        def fits(samples: int) -> bool:
            return self.step(replace(batches, micro_batch=samples)).fits

        return largest_that_fits(fits, batches.micro_batch)

    def buckets(self) -> list[tuple[float, Batches]]:
        """(fraction of the steps, batches) of each length bucket, shortest first. Raises as `synthetic_data`."""
        return list(self._buckets(synthetic_data(self.config, self.ranks)[1]))

    def _buckets(self, policy: Any) -> Iterator[tuple[float, Batches]]:
        accumulation = self.longest().accumulation
        per_step = self.ranks * accumulation
        sizes = [size // per_step for size in policy.batch_sizes]
        if isinstance(policy, PackedPolicy):
            # As samples of the mean length: their attention, a few hundredths of the FLOPs, is too small by a third.
            streams = np.array(policy.shapes[0]) * sizes[0]
            samples = streams[0] * policy.useful_fraction / policy.lengths[:, 0].mean()
            samples = max(1, round(samples))
            yield 1.0, Batches(Lengths(*(-(-streams // samples)).tolist()), samples, accumulation)
            return
        steps = np.array(policy.sample_counts) / np.array(policy.batch_sizes)
        for shape, size, part in zip(policy.shapes, sizes, steps / steps.sum(), strict=True):
            if part:
                yield float(part), Batches(Lengths(*shape), size, accumulation)

    def run(self) -> "Run":
        """A whole run, in the mean over the buckets."""
        longest, policy = self.longest(), synthetic_data(self.config, self.ranks)[1]
        shapes = list(self._buckets(policy))
        own, steps = self.step(longest), [(part, self.step(each)) for part, each in shapes]
        # The micro-batch of each bucket is in proportion to that of the longest.
        largest = [self.largest(longest)]
        largest += [self.largest(e) * longest.micro_batch // e.micro_batch for _, e in shapes]
        seconds = sum(part * each.seconds for part, each in steps)
        flops = sum(part * each.flops for part, each in steps)
        counts, sizes = np.array(policy.sample_counts), np.array(policy.batch_sizes)
        frames = policy.useful_fraction * (counts * [shape[0] for shape in policy.shapes]).sum()
        return Run(
            longest=own,
            peak=max([own, *(each for _, each in steps)], key=lambda each: each.bytes),
            largest=min(largest),
            seconds=seconds,
            mfu=flops / self.cluster.gpus / self.cluster.device.peak_flops / seconds,
            hours_per_step=float(
                frames / (counts / sizes).sum() / self.config.data.frames_per_second / 3600
            ),
            steps=self.config.training.steps,
        )


def largest_that_fits(fits: Callable[[int], bool], guess: int, limit: int = MAX_BATCH) -> int:
    """The largest n from 1 to `limit` with fits(n), as a linear search from 1 finds it; 0 if 1 does not fit.

    Steps of doubling size away from the guess enclose it, then bisection finds it, so a good guess takes
    few trials. `fits`: monotonic; called once for each value.
    """
    low, high = 0, limit + 1  # fits, does not fit
    trial, step = min(max(guess, 1), limit), 1
    while high - low > 1:
        if fits(trial):
            low, trial = trial, trial + step
        else:
            high, trial = trial, trial - step
        step *= 2
        if not low < trial < high:  # enclosed
            trial = (low + high) // 2
    return low


@dataclass(frozen=True)
class Run:
    """A whole run with utterances of [benchmark] mean_seconds and sigma."""

    longest: Forecast
    peak: Forecast
    """of the bucket that needs the most memory"""

    largest: int
    """local_batch_size with which every bucket fits"""

    seconds: float
    """of a step in the mean"""

    mfu: float
    hours_per_step: float
    """of audio without padding"""

    steps: int

    @property
    def gpu_hours(self) -> float:
        """Without validation, checkpoints and restarts."""
        return self.steps * self.seconds * self.longest.layout.gpus / 3600


def longest_batches(config: JobConfig, ranks: int) -> Batches:
    """Batches of samples as long as the limits of [data] allow. `config`: as upstream sees it."""
    data = config.data
    longest = data.bucket_frames[-1] if data.bucket_frames else data.max_frames
    lengths = Lengths(longest, data.max_text_tokens, data.max_speaker_frames)
    return Batches(lengths, config.training.local_batch_size, accumulation_steps(config, ranks))


def layouts(config: JobConfig, cluster: Cluster) -> Iterator[list[Settings]]:
    """Tensor parallelism within a node; shards that fill a part of a node or several nodes; replicas. Of each the ways
    to have it: with sequence parallelism, with weights that stay, with a frozen encoder that is sharded."""
    args = model_flavors()[config.model.flavor]
    shared = gcd(args.n_heads, args.mlp_dim, cluster.gpus_per_node)
    for tensor in (degree for degree in (1, 2, 4, 8) if shared % degree == 0):
        ranks, in_node = cluster.gpus // tensor, cluster.gpus_per_node // tensor
        for shards in (n for n in range(1, ranks + 1) if ranks % n == 0):
            if in_node % shards and shards % in_node:
                continue
            keys: dict[str, Any] = {"tensor_parallel_degree": tensor}
            if tensor > 1:
                keys["backend"] = "megatron"
            keys["data_parallel_replicate_degree"] = ranks // shards
            keys["data_parallel_shard_degree"] = shards
            yield list(_ways(config, keys, tensor > 1, shards > 1))


def _ways(
    config: JobConfig, degrees: dict[str, Any], divided: bool, sharded: bool
) -> Iterator[Settings]:
    either = (False, True)
    for sequence, stay in product(either[: 1 + divided], either[: 1 + sharded]):
        way: Settings = {"parallelism": dict(degrees)}
        if stay == reshards(config.parallelism):
            way["parallelism"]["fsdp_reshard_after_forward"] = "never" if stay else "default"
        if sequence != config.megatron.sequence_parallel:
            way["megatron"] = {"sequence_parallel": sequence}
        yield way


def with_settings(config: JobConfig, settings: Settings) -> JobConfig:
    changed = {name: replace(getattr(config, name), **keys) for name, keys in settings.items()}
    return replace(config, **changed)


def compare_layouts(planner: Planner, given: JobConfig) -> list[tuple[Forecast, Settings]]:
    """Every layout that training accepts and that fits, the fastest first, each in the way, with the checkpointing and
    micro-batch, that is fastest among those that fit, in the longest bucket."""
    total, found = given.training.global_batch_size, []
    kinds: list[dict[str, Any]] = [{"mode": "none"}, {"mode": "full"}]
    if blocks_compiled(given):
        kinds.insert(1, {"mode": "memory_budget", "memory_budget": 0.9})
    for ways in layouts(given, planner.cluster):
        choices = []
        for way, kind in product(ways, kinds):
            each = way | {"activation_checkpoint": kind}
            config = with_settings(given, each)
            ranks = Layout.of(config, planner.cluster.gpus).ranks
            for steps in (n for n in range(1, total // ranks + 1) if total % (ranks * n) == 0):
                batch = total // ranks // steps
                batches = replace(planner.longest(), micro_batch=batch, accumulation=steps)
                step = planner.step(batches, config)
                if step.fits:
                    training = {"local_batch_size": 0, "max_local_batch_size": batch}
                    choices.append((step, each | {"training": training}))
                    break
        for choice in sorted(choices, key=_seconds):
            with suppress(InputError):
                chosen = with_settings(given, choice[1])
                validate_config(chosen, planner.cluster.gpus, list(model_flavors()), ACCELERATOR)
                found.append(choice)
                break
    return sorted(found, key=_seconds)


def _seconds(choice: tuple[Forecast, Settings]) -> float:
    return choice[0].seconds
