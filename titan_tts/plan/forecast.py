"""The forecast of a config on a number of GPUs: one step, a whole run, and every layout of the same GPUs."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any

import numpy as np

from titan_tts.plan.devices import ACCELERATOR, Cluster
from titan_tts.plan.parameters import Model, describe_model
from titan_tts.plan.step import Batches, Layout, Step
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.batch_split import batch_split
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.compile import blocks_compiled
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.run.benchmark.synthetic import synthetic_data

MAX_BATCH = 4096
Settings = dict[str, dict[str, Any]]
"""section -> key -> value"""


class Planner:
    """Forecasts for configs with the same model on a cluster. A run has utterances of [benchmark] mean_seconds and sigma."""

    def __init__(self, config: JobConfig, cluster: Cluster, model: Model | None = None):
        self.ranks = Layout.of(config, cluster.gpus).ranks
        device = replace(cluster.device, peak_tflops=config.metrics.peak_tflops)
        self.cluster = replace(cluster, device=device)
        self.config = upstream_view(config, run_folder_path(config), self.ranks)
        self.model = model or describe_model(self.config)

    def longest(self) -> Batches:
        """Batches of samples as long as the limits of [data] allow."""
        data, training = self.config.data, self.config.training
        frames = data.bucket_frames[-1] if data.bucket_frames else data.max_frames
        limits = data.max_text_tokens, data.max_speaker_frames, data.max_caption_tokens
        accumulation = batch_split(training, self.ranks)[1]
        return Batches(Lengths(frames, *limits), training.local_batch_size, accumulation)

    def step(self, batches: Batches, config: JobConfig | None = None) -> Step:
        return Step(config or self.config, self.model, self.cluster, batches)

    def largest(self, batches: Batches) -> int:
        """The largest micro-batch of this shape that fits."""

        def fits(samples: int) -> bool:
            return self.step(replace(batches, micro_batch=samples)).fits

        return largest_that_fits(fits, batches.micro_batch)

    @cached_property
    def _policy(self) -> Any:
        """Buckets or packed rows of lengths as [benchmark] has them. Raises as `synthetic_data`."""
        return synthetic_data(self.config, self.ranks)[1]

    def buckets(self) -> list[tuple[float, Batches]]:
        """(fraction of the steps, batches) of each length bucket, shortest first. Raises as `synthetic_data`."""
        policy, accumulation = self._policy, self.longest().accumulation
        captions = self.config.data.max_caption_tokens
        sizes = [size // (self.ranks * accumulation) for size in policy.batch_sizes]
        if isinstance(policy, PackedPolicy):
            # As samples of the mean length: their attention, a few hundredths of the FLOPs, is too small by a third.
            streams = np.array(policy.shapes[0]) * sizes[0]
            samples = streams[0] * policy.useful_fraction / policy.lengths[:, 0].mean()
            samples = max(1, round(samples))
            lengths = Lengths(*(-(-streams // samples)).tolist())
            mean = replace(lengths, caption_tokens=captions)
            return [(1.0, Batches(mean, samples, accumulation))]
        steps = np.array(policy.sample_counts) / np.array(policy.batch_sizes)
        parts = (steps / steps.sum()).tolist()
        return [
            (part, Batches(replace(Lengths(*shape), caption_tokens=captions), size, accumulation))
            for shape, size, part in zip(policy.shapes, sizes, parts, strict=True)
            if part
        ]

    @cached_property
    def steps(self) -> list[tuple[float, Step]]:
        """(fraction of the steps, step) of each length bucket."""
        return [(part, self.step(each)) for part, each in self.buckets()]

    @property
    def peak(self) -> Step:
        """The step of the bucket that needs the most memory."""
        steps = [self.step(self.longest()), *(step for _, step in self.steps)]
        return max(steps, key=lambda step: step.bytes)

    @property
    def largest_of_all(self) -> int:
        """The largest local_batch_size with which every bucket fits; theirs are in proportion."""
        longest, shapes = self.longest(), [step.batches for _, step in self.steps]
        each = [self.largest(shape) * longest.micro_batch // shape.micro_batch for shape in shapes]
        return min([self.largest(longest), *each])

    @property
    def seconds(self) -> float:
        """Seconds of a step in the mean over the buckets."""
        return sum(part * step.seconds for part, step in self.steps)

    @property
    def mfu(self) -> float:
        """MFU in the mean over the buckets."""
        flops = sum(part * step.flops for part, step in self.steps)
        return self.step(self.longest()).mfu(self.seconds, flops)

    @property
    def hours_per_step(self) -> float:
        """Hours of audio without padding, in the mean over the buckets."""
        policy = self._policy
        counts, frames = np.array(policy.sample_counts), [shape[0] for shape in policy.shapes]
        steps = (counts / np.array(policy.batch_sizes)).sum()
        found = policy.useful_fraction * (counts * frames).sum() / steps
        return float(found) / self.config.data.frames_per_second / 3600


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


def layouts(config: JobConfig, cluster: Cluster) -> Iterator[Settings]:
    """Tensor parallelism within a node, with sequence parallelism or without; shards that fill a part of a node or
    several nodes, whose weights stay gathered through a step or do not; replicas."""
    args = model_flavors()[config.model.flavor]
    shared = gcd(args.n_heads, args.mlp_dim, cluster.gpus_per_node)
    either = (False, True)
    degrees = (1,) if config.lora.rank else (1, 2, 4, 8)
    for tensor in (degree for degree in degrees if shared % degree == 0):
        ranks, in_node = cluster.gpus // tensor, cluster.gpus_per_node // tensor
        for shards in (n for n in range(1, ranks + 1) if ranks % n == 0):
            if in_node % shards and shards % in_node:
                continue
            for sequence, stay in product(either[: min(2, tensor)], either[: min(2, shards)]):
                keys: dict[str, Any] = {"backend": "megatron"} if tensor > 1 else {}
                keys["tensor_parallel_degree"] = tensor
                keys["data_parallel_replicate_degree"] = ranks // shards
                keys["data_parallel_shard_degree"] = shards
                keys["fsdp_reshard_after_forward"] = "never" if stay else "default"
                yield {"parallelism": keys, "megatron": {"sequence_parallel": sequence}}


def compare_layouts(planner: Planner, given: JobConfig) -> list[tuple[Step, Settings]]:
    """Every layout that training accepts and that fits, the fastest first, each in the way, with the checkpointing and
    micro-batch, that is fastest among those that fit, in the longest bucket."""
    total, gpus, choices = given.training.global_batch_size, planner.cluster.gpus, []
    kinds: list[dict[str, Any]] = [{"mode": "none"}, {"mode": "full"}]
    if blocks_compiled(given):
        kinds.insert(1, {"mode": "memory_budget", "memory_budget": 0.9})
    for way, kind in product(layouts(given, planner.cluster), kinds):
        each = way | {"activation_checkpoint": kind}
        config = with_settings(given, each)
        ranks = Layout.of(config, gpus).ranks
        for steps in (n for n in range(1, total // ranks + 1) if total % (ranks * n) == 0):
            batch = total // ranks // steps
            batches = replace(planner.longest(), micro_batch=batch, accumulation=steps)
            step = planner.step(batches, config)
            if step.fits:
                training = {"local_batch_size": 0, "max_local_batch_size": batch}
                choices.append((step, each | {"training": training}))
                break
    found: dict[Layout, tuple[Step, Settings]] = {}
    for step, settings in sorted(choices, key=lambda choice: choice[0].seconds):
        if step.layout not in found:
            with suppress(InputError):
                chosen = with_settings(given, settings)
                validate_config(chosen, gpus, list(model_flavors()), ACCELERATOR)
                found[step.layout] = step, settings
    return list(found.values())


def with_settings(config: JobConfig, settings: Settings) -> JobConfig:
    changed = {name: replace(getattr(config, name), **keys) for name, keys in settings.items()}
    return replace(config, **changed)
