"""Time, memory and MFU of a config's optimizer steps on a named cluster."""

from dataclasses import dataclass, replace

from torchtitan.models.dit_tts.config.checks import data_parallel_degree
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan.arithmetic import StepArithmetic, step_arithmetic
from torchtitan.models.dit_tts.plan.buckets import Bucket, estimated_buckets
from torchtitan.models.dit_tts.plan.communication import Communication, communication
from torchtitan.models.dit_tts.plan.compiled_block import blocks_compiled, with_blocks
from torchtitan.models.dit_tts.plan.constants import Constants
from torchtitan.models.dit_tts.plan.devices import Cluster, check_device, runs_fp8
from torchtitan.models.dit_tts.plan.flops_split import FlopsSplit, split_flops
from torchtitan.models.dit_tts.plan.memory import MemoryNeed, largest_micro_batch, memory_need
from torchtitan.models.dit_tts.plan.parameters import build_on_meta, model_sizes
from torchtitan.models.dit_tts.plan.profile import Profile, Profiler, Shape
from torchtitan.models.dit_tts.plan.states import DataParallelLayout, StateMemory, state_memory
from torchtitan.models.dit_tts.plan.step_time import (
    Interval,
    StepTime,
    StepWork,
    copied_bytes,
    optimizer_bytes,
    step_time,
    with_error,
)


@dataclass(frozen=True)
class StepForecast:
    """One optimizer step with micro-batches of one shape."""

    lengths: Lengths
    micro_batch: int
    flops: FlopsSplit
    """of all ranks"""

    memory: MemoryNeed
    time: StepTime
    seconds: Interval
    mfu: Interval
    """over the dense bf16 peak, also in fp8"""

    samples_per_second: Interval
    communication: Communication
    overlaps: bool


@dataclass(frozen=True)
class BucketForecast:
    bucket: Bucket
    step: StepForecast
    largest: int
    """micro-batch that fits, in samples"""


@dataclass(frozen=True)
class Forecast:
    """What `titan-tts plan` says of one config."""

    config: JobConfig
    cluster: Cluster
    constants: Constants
    layout: DataParallelLayout
    parameters: int
    arithmetic: StepArithmetic
    states: StateMemory
    longest: StepForecast
    neediest: StepForecast
    """of all buckets, the one that needs most memory"""

    a_sample: int
    """bytes that one more sample would keep there"""

    other_mode: MemoryNeed
    """there, compiled where the config is eager and eager where it is compiled"""

    largest: int
    """local_batch_size with which every bucket fits"""

    buckets: list[BucketForecast]
    mix_seconds: Interval
    """mean step over the buckets' shares"""

    mix_mfu: Interval


def layout_of(config: JobConfig, gpus: int) -> DataParallelLayout:
    """Raises InputError at degrees that do not multiply to the number of GPUs."""
    ranks = data_parallel_degree(config, gpus)
    replicas = config.parallelism.data_parallel_replicate_degree
    return DataParallelLayout(replicas, ranks // replicas)


class Forecaster:
    """Forecasts steps of configs that differ in layout, checkpointing, compile and batch alone."""

    def __init__(self, config: JobConfig, cluster: Cluster, constants: Constants, *, shorter: bool):
        """
        Args:
            config: its model and limits hold for all.
            shorter: whether other shapes than the longest bucket's will be asked for.

        Raises:
            InputError: the device cannot train it, or nothing is known of its rate.
        """
        check_device(config, cluster.device)
        self.cluster = cluster
        self.constants = constants
        seen = upstream_view(config, run_folder_path(config), cluster.gpus)
        sizes = model_sizes(seen)
        # Which attention kernel runs is a constant of the time, and memory is alike in all.
        self.args = replace(sizes.args, attention="sdpa")
        self._source = sizes.source
        model = build_on_meta(self.args, config.training.dtype)
        self.parameters = sum(p.numel() for p in model.parameters())
        self._units = self.args.n_layers + 2
        self.lengths = step_arithmetic(seen, self.args, cluster.gpus).lengths
        self._profiler = Profiler(self.args, self.lengths, seen.training.local_batch_size)
        self._shorter = shorter
        self._states: dict[tuple, StateMemory] = {}

    def states(self, config: JobConfig, layout: DataParallelLayout) -> StateMemory:
        key = layout, config.training.enable_cpu_offload
        if key not in self._states:
            self._states[key] = state_memory(config, self.args, self._source, layout)
        return self._states[key]

    def profile(self, config: JobConfig, layout: DataParallelLayout) -> Profile:
        return self._profiler.profile(config, sharded=layout.sharded, shorter=self._shorter)

    def memory(
        self, config: JobConfig, layout: DataParallelLayout, lengths: Lengths, samples: int
    ) -> MemoryNeed:
        shape = Shape(samples, lengths.frames, lengths.text_tokens)
        profile, states = self.profile(config, layout), self.states(config, layout)
        return memory_need(profile, states, self.cluster.device, shape)

    def work(
        self,
        config: JobConfig,
        layout: DataParallelLayout,
        lengths: Lengths,
        samples: int,
        accumulation: int,
    ) -> StepWork:
        """Of one GPU in one step, with the longest bucket's references."""
        device = self.cluster.device
        states = self.states(config, layout)
        shape = Shape(samples, lengths.frames, lengths.text_tokens)
        flops = split_flops(self.args, lengths)
        trained_inside = bool(self.args.text_encoder)
        return StepWork(
            device=device,
            micro_batch=self.profile(config, layout).work(device, shape),
            accumulation=accumulation,
            fp8=runs_fp8(config),
            encoder_flops=0.0 if trained_inside else samples * flops.text_encoder,
            copied_bytes=copied_bytes(config, self.parameters, layout),
            optimizer_bytes=optimizer_bytes(config, states),
            communication=communication(
                config, self.parameters, states, layout, self.cluster, self._units, accumulation
            ),
            model_flops=float(accumulation * samples * flops.total),
        )

    def step(
        self,
        config: JobConfig,
        layout: DataParallelLayout,
        lengths: Lengths,
        samples: int,
        accumulation: int,
    ) -> StepForecast:
        work = self.work(config, layout, lengths, samples, accumulation)
        time = step_time(work, self.constants)
        seconds = with_error(lambda constants: step_time(work, constants).seconds, self.constants)
        all_samples = layout.gpus * accumulation * samples
        at_peak = work.model_flops / self.cluster.device.peak_flops
        return StepForecast(
            lengths=lengths,
            micro_batch=samples,
            flops=split_flops(self.args, lengths) * all_samples,
            memory=self.memory(config, layout, lengths, samples),
            time=time,
            seconds=seconds,
            mfu=_rate(at_peak, seconds),
            samples_per_second=_rate(all_samples, seconds),
            communication=work.communication,
            overlaps=work.communication.overlaps(time.computing, self.constants),
        )

    def largest(self, config: JobConfig, layout: DataParallelLayout, lengths: Lengths) -> int:
        return largest_micro_batch(
            self.profile(config, layout),
            self.states(config, layout),
            self.cluster.device,
            lengths.frames,
            lengths.text_tokens,
        )


def _rate(amount: float, seconds: Interval) -> Interval:
    return Interval(amount / seconds.high, amount / seconds.middle, amount / seconds.low)


def forecast(config: JobConfig, cluster: Cluster, constants: Constants) -> Forecast:
    """Raises InputError for what a run with these settings would end with before it reads data."""
    layout = layout_of(config, cluster.gpus)
    config = upstream_view(config, run_folder_path(config), cluster.gpus)
    forecaster = Forecaster(config, cluster, constants, shorter=True)
    arithmetic = step_arithmetic(config, forecaster.args, cluster.gpus)
    longest = forecaster.step(
        config, layout, arithmetic.lengths, arithmetic.micro_batch, arithmetic.accumulation
    )
    buckets = []
    most = arithmetic.micro_batch
    largest = forecaster.largest(config, layout, arithmetic.lengths)
    for bucket in estimated_buckets(config, cluster.gpus):
        step = forecaster.step(
            config, layout, bucket.lengths, bucket.micro_batch, arithmetic.accumulation
        )
        fits = forecaster.largest(config, layout, bucket.lengths)
        buckets.append(BucketForecast(bucket, step, fits))
        # Every bucket's micro-batch is as many times larger as the longest's.
        largest = min(largest, fits * most // bucket.micro_batch)
    neediest = max([longest, *(each.step for each in buckets)], key=lambda step: step.memory.total)
    shape = layout, neediest.lengths, neediest.micro_batch
    one_more = forecaster.memory(config, *shape[:-1], neediest.micro_batch + 1)
    other = with_blocks(config, not blocks_compiled(config))
    mean = sum(each.bucket.share * each.step.seconds.middle for each in buckets)
    # The buckets' errors have the same causes: relative ones are averaged as they are.
    high = sum(each.bucket.share * each.step.seconds.high for each in buckets)
    mix = Interval(mean * mean / high, mean, high)
    flops = sum(each.bucket.share * each.step.flops.total for each in buckets)
    return Forecast(
        config=config,
        cluster=cluster,
        constants=constants,
        layout=layout,
        parameters=forecaster.parameters,
        arithmetic=arithmetic,
        states=forecaster.states(config, layout),
        longest=longest,
        neediest=neediest,
        a_sample=one_more.activations.saved - neediest.memory.activations.saved,
        other_mode=forecaster.memory(other, *shape),
        largest=largest,
        buckets=buckets,
        mix_seconds=mix,
        mix_mfu=_rate(flops / cluster.gpus / cluster.device.peak_flops, mix),
    )
