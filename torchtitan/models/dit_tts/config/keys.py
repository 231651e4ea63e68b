"""What `job_config.py` declares of the keys: bounds, and marks of what a change of a key means."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.marks import INHERITED, SECTION_MARKS, Bounds, Mark
from torchtitan.models.dit_tts.errors import require


def declared(cls: Any = JobConfig, section: str = "") -> Iterator[tuple[str, set[Bounds | Mark]]]:
    """(section.key, its bounds and marks) of every key of a config, or of one section."""
    for each in fields(cls):
        name = f"{section}.{each.name}" if section else each.name
        if is_dataclass(each.type):
            yield from declared(each.type, name)
            continue
        given = getattr(each.type, "__metadata__", ())
        of_section = {SECTION_MARKS[section]} if section in SECTION_MARKS else set()
        yield name, {*given, *INHERITED.get(name, ()), *of_section}


def marked(*marks: Mark) -> tuple[str, ...]:
    """Names of the keys that have one of these marks."""
    return tuple(name for name, given in declared() if given & {*marks})


def check_numbers(config: Any, section: str = "") -> None:
    """Raises InputError at the first number, of a config or of one section, that its key does not allow."""
    for name, given in declared(type(config), section):
        value = attrgetter(name.removeprefix(f"{section}."))(config)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        in_section, _, key = name.rpartition(".")
        shown = f"[{in_section}] {key} = {value}, but it must"
        unlimited = value == math.inf and name == "training.max_norm"
        # An integer may be too large for `isfinite`.
        finite = isinstance(value, int) or math.isfinite(value)
        require(finite or unlimited, f"{shown} be finite")
        require(abs(value) < 2**63 or unlimited, f"{shown} be below 2^63")
        for bounds in given:
            if isinstance(bounds, Bounds):
                require(_within(value, bounds), f"{shown} {_in_words(bounds)}")


def _within(value: float, bounds: Bounds) -> bool:
    above = value > bounds.low if bounds.open_low else value >= bounds.low
    return above and (value < bounds.high if bounds.open_high else value <= bounds.high)


def _in_words(bounds: Bounds) -> str:
    if bounds == Bounds(0):
        return "not be negative"
    low = f"{'greater than' if bounds.open_low else 'at least'} {bounds.low}"
    high = f"{'below' if bounds.open_high else 'at most'} {round(bounds.high, 2)}"
    if bounds.high == math.inf:
        return f"be {low}"
    if bounds.low == -math.inf:
        return f"be {high}"
    if bounds.open_low:
        return f"be {low} and {high}"
    return f"be from {bounds.low} to {'below ' if bounds.open_high else ''}{round(bounds.high, 2)}"
