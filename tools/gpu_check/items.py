"""What a stage is made of: items that are measured one after another, and the lines they leave.

A stage's process appends one JSON line an item, so that whatever ends the process, what was measured
before stands. At import the standard library only: the process that watches the stages needs nothing else.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MEASURED = "measured"
PASSED = "passed"
FAILED = "failed"
OOM = "oom"
NOT_MEASURED = "not measured"

AGAIN = 75
"""exit status of a stage's process that asks for a new one, for the items it has no row of"""

Values = dict[str, Any]
"""Figures by name, the unit in the name; under "passed" a bool where the item is a check"""


class NotMeasured(Exception):
    """This item cannot be measured here, and why."""


def is_out_of_memory(error: Exception) -> bool:
    """Of the device or the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if "torch" not in sys.modules:  # stages that only start other processes
        return False
    from torchtitan.models.dit_tts.errors import failure_state

    return failure_state(error) == "oom"


@dataclass(frozen=True)
class Item:
    """One line of the table."""

    name: str
    measure: Callable[[], Values]
    seconds: float = 0.0
    """time it takes at least: with less left it is not started"""


@dataclass(frozen=True)
class Row:
    """What became of an item."""

    item: str
    status: str
    seconds: float = 0.0
    values: Values = field(default_factory=dict)
    why: str = ""
    """of every status but measured and passed"""


def write_line(path: Path, content: dict[str, Any]) -> None:
    """Appends a JSON line in one write."""
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps(content) + "\n").encode())


def write_row(path: Path, row: Row) -> None:
    write_line(path, asdict(row))


def read_stage(path: Path) -> tuple[list[str] | None, list[Row]]:
    """Names of a stage's items, None if it has not got so far, and the rows it has left. A line that
    a kill cut short is left out."""
    if not path.exists():
        return None, []
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    names = next((line["items"] for line in lines if "items" in line), None)
    return names, [Row(**line) for line in lines if "item" in line]
