"""Items that are measured, each in a process of its own, and what becomes of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEASURED, PASSED, FAILED, OOM = "measured", "passed", "failed", "oom"
NOT_MEASURED = "not measured"

Values = dict[str, Any]
"""Figures by name, the unit in the name; under "passed" a bool where the item is a check"""

Turn = Callable[[], None]
"""Called once by an item that has built, compiled and warmed up, and is timed. Returns when the device is its alone."""


class NotMeasured(Exception):
    """The item cannot be measured here, and why."""


@dataclass(frozen=True)
class Settings:
    """Settings that every process of the check gets."""

    tiny: bool
    """small sizes that a CPU runs in minutes: whether everything works, not how fast"""

    work: str
    """folder of rows, runs, logs and compiled kernels"""

    groups: list[str]
    """what is measured, in this order"""

    flavors: list[str]
    only: str = ""
    """a part of the names of the items that are measured; empty: all"""

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"


@dataclass(frozen=True)
class Item:
    group: str
    name: str
    measure: Callable[[Turn], Values]
    gib: float = 6.0
    """device memory that it holds at most"""


@dataclass
class Row:
    """Result of an item."""

    item: str
    status: str
    values: Values = field(default_factory=dict)
    why: str = ""
    """of every status but measured and passed"""

    began: float = 0.0
    """time.time() at which the timed section began; 0: it did not"""

    seconds: float = 0.0
    """of the timed section"""

    def __str__(self) -> str:
        """The status, and some figures or why there are none."""
        plain = {k: v for k, v in self.values.items() if isinstance(v, (int, float, str))}
        shown = [f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in plain.items()]
        return ": ".join(filter(None, [self.status, self.why or ", ".join(shown[:8])]))
