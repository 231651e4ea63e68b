"""Items that are measured, each in a process of its own, and what becomes of them. Imports nothing but the standard
library: the process that watches the others needs no more."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEASURED = "measured"
PASSED = "passed"
FAILED = "failed"
OOM = "oom"
NOT_MEASURED = "not measured"

Values = dict[str, Any]
"""Figures by name, the unit in the name; under "passed" a bool where the item is a check"""

Turn = Callable[[], None]
"""Called once by an item that has built, compiled and warmed up, and is timed. Returns when the device is its alone."""


class NotMeasured(Exception):
    """The item cannot be measured here, and why."""


@dataclass(frozen=True)
class Item:
    group: str
    name: str
    measure: Callable[[Turn], Values]
    gib: float = 4.0
    """device memory that it holds at most"""


@dataclass
class Row:
    """What became of an item."""

    item: str
    status: str
    seconds: float = 0.0
    """of the timed section"""

    values: Values = field(default_factory=dict)
    why: str = ""
    """of every status but measured and passed"""

    began: float = 0.0
    """time.time() of the timed section's begin"""


def read_row(path: Path) -> Row | None:
    return Row(**json.loads(path.read_text())) if path.is_file() else None


def short(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def described(row: Row) -> str:
    """A row in words: its status, and its figures or why it has none."""
    plain = {name: v for name, v in row.values.items() if isinstance(v, (int, float, str))}
    figures = ", ".join(f"{name} {short(value)}" for name, value in [*plain.items()][:8])
    return ": ".join(filter(None, [row.status, row.why or figures]))
