"""Bounds of the config's keys, and marks of what a change of a key means, as the sections declare them."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from typing import Any

from torchtitan.models.dit_tts.config.job_config import UPSTREAM, JobConfig
from torchtitan.models.dit_tts.config.marks import Bounds, Mark
from torchtitan.models.dit_tts.errors import InputError, require


def declared(
    cls: Any = JobConfig, section: str = "", marks: tuple[Mark, ...] = ()
) -> Iterator[tuple[str, set[Bounds | Mark]]]:
    """(section.key, its bounds and marks) of every key of a config, or of one section with its marks."""
    for each in fields(cls):
        name = f"{section}.{each.name}" if section else each.name
        if is_dataclass(each.type):
            yield from declared(each.type, name, each.metadata.get("marks", marks))
        else:
            given = getattr(each.type, "__metadata__", ())
            yield name, {*given, *marks, *_of_upstream(name)}


@cache
def _of_upstream(name: str) -> tuple[Bounds | Mark, ...]:
    found = UPSTREAM.items()
    return tuple(
        given for given, keys in found if any(fnmatchcase(name, each) for each in keys.split())
    )


def marked(*marks: Mark) -> tuple[str, ...]:
    """Names of the keys that have one of these marks."""
    return tuple(name for name, given in declared() if given & {*marks})


def conflict(config: Any, names: str, why: str) -> InputError:
    """The error for settings that cannot work: each key of `names` with its value, then the reason and the remedy."""
    shown, last = [], ""
    for name in names.split():
        section, _, key = name.rpartition(".")
        value = attrgetter(name)(config)
        value = str(value).lower() if isinstance(value, bool) else repr(value)
        shown.append(f"{key} = {value}" if section == last else f"[{section}] {key} = {value}")
        last = section
    first, *rest = shown
    return InputError(f"{first}{' with ' if rest else ''}{', '.join(rest)}: {why}")


def check_numbers(config: Any, section: str = "") -> None:
    """Raises InputError at the first number, of a config or of one section, that its key does not allow."""
    for name, given in declared(type(config), section):
        value = attrgetter(name.removeprefix(f"{section}."))(config)
        in_section, _, key = name.rpartition(".")
        shown = f"[{in_section}] {key} = {value}"
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            unlimited = number == math.inf and name == "training.max_norm"
            # An integer may be too large for `isfinite`.
            finite = isinstance(number, int) or math.isfinite(number)
            require(finite or unlimited, f"{shown}, but it must be finite")
            require(abs(number) < 2**63 or unlimited, f"{shown}, but it must be below 2^63")
            for bounds in given:
                if isinstance(bounds, Bounds):
                    require(_within(number, bounds), f"{shown}, but it must {_in_words(bounds)}")


def _within(value: float, bounds: Bounds) -> bool:
    above = value > bounds.low if bounds.open_low else value >= bounds.low
    return above and (value < bounds.high if bounds.open_high else value <= bounds.high)


def _in_words(bounds: Bounds) -> str:
    low = f"{'greater than' if bounds.open_low else 'at least'} {bounds.low}"
    high = f"{'below' if bounds.open_high else 'at most'} {round(bounds.high, 2)}"
    return f"be {low}" if bounds.high == math.inf else f"be {low} and {high}"
