"""Bounds and marks of config keys, declared next to their types."""

import enum
import math
from dataclasses import dataclass, field
from typing import Annotated, Any


@dataclass(frozen=True)
class Bounds:
    """Values of a number, or of each in a list; the limits are allowed unless they are named open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False


class Mark(enum.Enum):
    TRAINING = "a resume may change it only if [resume] allow has it"
    WEIGHTS = "as TRAINING, and so for a new run from a checkpoint's weights"
    WORKLOAD = "runs that differ in it do other work for a step, and are no repeats"
    INPUT = "as WORKLOAD, and it decides what a run reads: a sample is other work"
    EXPORTED = "a trained model cannot speak without it: config.json and fine_tune.toml have it"
    RECIPE = "fine_tune.toml has it: how a model was trained"
    OFF = "a switch of upstream's that this family would ignore or break on"
    UNUSED = "a key of upstream's that this family does not read; --help hides it"


TRAINING, WEIGHTS, WORKLOAD, INPUT, EXPORTED, RECIPE, OFF, UNUSED = Mark

POSITIVE, NOT_NEGATIVE, FRACTION = Bounds(0, open_low=True), Bounds(0), Bounds(0, 1)
PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
NonNegativeInt = Annotated[int, NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, FRACTION]
Frames = Annotated[int, Bounds(1, 10**6)]
"""Length of an utterance or reference"""


def section(kind: Any, *marks: Mark) -> Any:
    """A field of a config with a section, whose keys all have the marks."""
    return field(default_factory=kind, metadata={"marks": marks})
