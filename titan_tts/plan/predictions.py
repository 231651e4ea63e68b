"""What a plan says of a run: `Summary` without a named GPU, `Plan` on a cluster."""

from dataclasses import dataclass

from titan_tts.plan.devices import Cluster
from titan_tts.plan.memory import MemoryNeed
from titan_tts.plan.parameters import Download, Part
from titan_tts.plan.states import DataParallelLayout, StateMemory
from titan_tts.plan.step_time import Communication, Factor, Interval, StepTime
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
    """What is known of a run whatever its GPUs are."""

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
    time: StepTime
    seconds: Interval
    flops: int
    """of all ranks, without recomputation"""

    mfu: Interval
    """over the dense bf16 peak, also in fp8"""

    samples_per_second: Interval
    communication: Communication


@dataclass(frozen=True)
class BucketPlan:
    fraction: float
    """of the steps"""

    step: Step
    largest: int
    """micro-batch that fits, in samples"""


@dataclass(frozen=True)
class WholeRun:
    """All steps of a run, for lengths as [benchmark] has them."""

    steps: int
    warmup_steps: int
    batches: float
    """complete global batches of all steps; fewer than steps where there is a batch ramp"""

    warmup_batches: float
    hours_per_step: float
    """of audio without padding, in the mean over complete steps"""

    gpu_hours: Interval
    """without validation, checkpoints and restarts"""

    cost: Interval | None
    """None: no price was given"""


@dataclass(frozen=True)
class Plan:
    """What `titan-tts plan` prints of one config."""

    summary: Summary
    cluster: Cluster
    factor: Factor
    longest: Step
    neediest: Step
    """of all buckets, the one that needs the most memory"""

    largest: int
    """local_batch_size with which every bucket fits"""

    buckets: list[BucketPlan]
    mean_seconds: Interval
    """of a step, over the buckets"""

    mean_mfu: Interval
    run: WholeRun
