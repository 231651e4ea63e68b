"""Bounds and marks of config keys, which `job_config.py` declares next to their types."""

import enum
import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Bounds:
    """Values that a number may have; the limits are allowed unless they are named open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False


class Mark(enum.Enum):
    TRAINING = "a resume may change it only if [resume] allow has it"
    WEIGHTS = "as TRAINING, and so for a new run from a checkpoint's weights"
    WORKLOAD = "runs that differ in it do other work for a step, and are no repeats"
    INPUT = "as WORKLOAD, and it decides what a run reads: a sample is other work"


TRAINING, WEIGHTS, WORKLOAD, INPUT = Mark

_POSITIVE, _NOT_NEGATIVE = Bounds(0, open_low=True), Bounds(0)
PositiveInt = Annotated[int, _POSITIVE]
PositiveFloat = Annotated[float, _POSITIVE]
NonNegativeInt = Annotated[int, _NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, _NOT_NEGATIVE]
Fraction = Annotated[float, Bounds(0, 1)]
Frames = Annotated[int, Bounds(1, 10**6)]
"""Length of an utterance or reference"""

SECTION_MARKS = dict.fromkeys(("objective", "optimizer", "lr_scheduler", "ema"), TRAINING)
"""Section -> the mark of all its keys"""

INHERITED: dict[str, tuple[Bounds | Mark, ...]] = {
    "activation_checkpoint.memory_budget": (Bounds(0, 1),),
    "checkpoint.interval": (_POSITIVE,),
    "checkpoint.keep_latest_k": (_NOT_NEGATIVE,),
    "comm.init_timeout_seconds": (_POSITIVE,),
    "comm.train_timeout_seconds": (_POSITIVE,),
    "lr_scheduler.decay_ratio": (Bounds(0, 1),),
    "lr_scheduler.min_lr_factor": (Bounds(0, 1),),
    "lr_scheduler.warmup_steps": (_NOT_NEGATIVE,),
    "model.converters": (TRAINING,),
    "optimizer.beta1": (Bounds(0, 1),),
    "optimizer.beta2": (Bounds(0, 1),),
    "optimizer.eps": (_POSITIVE,),
    "optimizer.lr": (_NOT_NEGATIVE,),
    "optimizer.weight_decay": (_NOT_NEGATIVE,),
    "quantize.linear.float8.recipe_name": (WORKLOAD,),
    "training.enable_cpu_offload": (WORKLOAD,),
    "training.max_norm": (_POSITIVE, TRAINING),
    "training.steps": (_POSITIVE,),
}
"""Keys that upstream's dataclasses declare"""
