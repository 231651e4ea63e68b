"""Shared by the benchmarks: where the checkout is, medians with their range, and result files."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.run.run_folder import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and largest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(values: Iterable[float], others: Iterable[float]) -> dict[str, float]:
    """Spread of the ratios within a round, where conditions are alike."""
    return spread(a / b for a, b in zip(values, others, strict=True))


def cell(values: Mapping[str, float], digits: int = 2) -> str:
    """A spread as a table has it: median (least-largest)."""
    low, high = values["min"], values["max"]
    return f"{values['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def rotated(names: Sequence[Any], number: int) -> list[Any]:
    """The order of a round: each begins one name later than the round before."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def write_report(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the results with the conditions under which they were measured."""
    conditions = environment()
    del conditions["command"]  # has the paths of this machine, as have some variables
    variables = conditions["variables"].items()
    conditions["variables"] = {name: value for name, value in variables if "/" not in value}
    report = {**content, "conditions": conditions}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(path)
