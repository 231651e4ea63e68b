"""Predictions of a run: `Summary` without a named GPU, `Plan` on a cluster."""

from dataclasses import dataclass

from titan_tts.plan.devices import Cluster
from titan_tts.plan.memory import MemoryNeed
from titan_tts.plan.parameters import Download, Part
from titan_tts.plan.states import DataParallelLayout, StateMemory
from titan_tts.plan.step_time import Collective, Factor, Interval
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.model.flops import Lengths


@dataclass(frozen=True)
class Batches:
    """Batches of one static shape in every step."""

    lengths: Lengths
    """padded"""

    micro_batch: int
    """samples of one rank"""

    accumulation: int
    """micro-batches per step"""


@dataclass(frozen=True)
class Summary:
    """Predictions that hold for any kind of GPU."""

    config: JobConfig
    layout: DataParallelLayout
    parts: list[Part]
    unknown: tuple[str, ...]
    """sentences about what depends on the data"""

    states: StateMemory
    downloads: list[Download]
    longest: Batches
    """of the longest bucket"""

    samples: int
    """per step, of all ranks"""

    flops: int
    """per step of the longest bucket, of all ranks: training FLOPs without recomputation"""

    encoder_flops: int
    """likewise of a pretrained text encoder"""

    volumes: dict[str, float]
    """bytes through one rank in that step, by collective"""


@dataclass(frozen=True)
class Step:
    """A predicted optimizer step with micro-batches of one shape."""

    batches: Batches
    memory: MemoryNeed
    time: dict[str, float]
    """seconds of each part"""

    seconds: Interval
    flops: int
    """of all ranks, without recomputation"""

    mfu: Interval
    """over the dense bf16 peak, also in fp8"""

    samples_per_second: Interval
    communication: tuple[Collective, ...]
    fraction: float = 1.0
    """of a run's steps"""

    largest: int = 0
    """micro-batch of this shape that fits, in samples"""


@dataclass(frozen=True)
class Plan:
    """A config on a cluster, as `titan-tts plan` prints it; the whole run has lengths of [benchmark]."""

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
    """of a step, over the buckets"""

    mean_mfu: Interval
    global_batches: float
    """complete ones of all steps; fewer than steps where there is a batch ramp"""

    warmup_batches: float
    hours_per_step: float
    """of audio without padding, in the mean over complete steps"""

    gpu_hours: Interval
    """without validation, checkpoints and restarts"""

    cost: Interval | None
    """None: no price was given"""
