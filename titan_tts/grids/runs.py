"""Finds benchmarks below folders and reads each as one row: state, factors, measured and predicted figures.

Runs are only read. A run whose files cannot be read has the state "unreadable" and a reason.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_tts.grids.grid_file import AUTO, flat
from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.config.keys import marked
from torchtitan.models.dit_tts.config.marks import INPUT, WORKLOAD
from torchtitan.models.dit_tts.errors import InputError, printable
from torchtitan.models.dit_tts.run.factors import FACTORS

_SPLIT = ("data", "forward", "backward", "optimizer", "other")
FIGURES = (
    *("seconds_per_step", "samples_per_second", "audio_seconds_per_second"),
    *("mfu", "goodput_mfu", "hfu", "tflops_per_device", "peak_tflops"),
    *("padding_fraction", "text_padding_fraction", "reference_padding_fraction"),
    *("peak_allocated_gib", "peak_reserved_gib", "compiles_while_timed"),
    *(f"{part}_seconds" for part in _SPLIT),
    "loss",
)

PREDICTED = ("fits", "gib", "seconds_per_step", "samples_per_second", "mfu")
"""Entries of run.json's forecast, each a column `predicted_NAME`."""

COMPARED = (*FACTORS, "device")
"""Factors that distinguish the runs of a comparison; the axes of their grids are further ones."""

COLUMNS = ("name", "folder", "grid", "state", "reason", "repeat")
_MARKS = ("run.json", "benchmark.json")
_NOT_SEARCHED = ("checkpoint", "analysis", "trials")

DATA = marked(INPUT)
"""Keys that decide how much work a sample is."""

_WORK = marked(INPUT, WORKLOAD)
"""Keys that become factors where runs differ in them: runs of other work are no repeats."""


@dataclass
class Run:
    """One run; a key that is missing in `factors`, `figures` or `predicted` is not known."""

    folder: str
    name: str
    state: str = "unknown"
    reason: str = ""
    grid: str = ""
    repeat: int | None = None
    factors: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """True if statistics may use it: it has a throughput, and did not fail later."""
        return self.state == "completed" and "samples_per_second" in self.figures

    def row(self, axes: Sequence[str]) -> dict[str, Any]:
        """All columns, with the axes of `extra_axes`."""
        return {
            **{name: getattr(self, name) for name in COLUMNS},
            **{name: self.factors.get(name) for name in (*COMPARED, *axes)},
            **{name: self.figures.get(name) for name in FIGURES},
            **{f"predicted_{name}": self.predicted.get(name) for name in PREDICTED},
        }


def extra_axes(runs: Sequence[Run]) -> list[str]:
    """Axes of grids that are not in COMPARED."""
    return sorted({name for run in runs for name in run.factors} - set(COMPARED))


def find_runs(paths: Sequence[str]) -> list[Run]:
    """Every run in or below the folders, each once, in the order of their names."""
    found: dict[str, Run] = {}
    for path in paths:
        top = os.path.abspath(os.path.expanduser(path))
        if not os.path.isdir(top):
            raise InputError(f"RUNS = {path} is not a folder; give run folders")
        for folder, below, files in os.walk(top, onerror=_refuse):
            below[:] = sorted(name for name in below if name not in _NOT_SEARCHED)
            if any(name in _MARKS for name in files):
                below.clear()  # whatever is in it belongs to the run
                found.setdefault(os.path.realpath(folder), _read_run(folder, top))
    if not found:
        raise InputError(
            f"RUNS = {' '.join(map(str, paths))}, but none contains a benchmark ({' or '.join(_MARKS)}); "
            "give run folders"
        )
    for key in _WORK:
        having = [run for run in found.values() if key in run.workload]
        if len({run.workload[key] for run in having}) > 1:
            for run in having:
                run.factors.setdefault(key, run.workload[key])
    return sorted(found.values(), key=lambda run: run.folder)


def _refuse(error: OSError) -> None:
    raise InputError(f"RUNS: {error.filename} cannot be read ({error.strerror})")


def _read_run(folder: str, top: str) -> Run:
    """One run; where no file names it, its name is the folder's relative to `top`."""
    name = os.path.relpath(folder, top)
    name = os.path.basename(top) if name == "." else name
    try:
        return _read(Path(folder), name)
    except Exception as error:  # whatever the files hold, the other runs are analysed
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename:
            reason = f"{os.path.basename(error.filename)}: {error.strerror}"
        return Run(folder, name, "unreadable", _line(reason))


def _read(folder: Path, name: str) -> Run:
    """Reads run.json's state and factors, or else state.json's, and the figures of benchmark.json."""
    record, report, state = (
        _object(folder / f"{file}.json") for file in ("run", "benchmark", "state")
    )
    said, forecast = record or state, record.get("forecast") or {}
    run = Run(
        str(folder),
        str(record.get("name") or report.get("run_name") or name),
        str(said.get("state", "completed" if report else "unknown")),
        _line(said.get("reason") or said.get("error") or state.get("error") or ""),
        str(record.get("grid") or ""),
        record.get("repeat"),
        _plain(record.get("factors") or {}),
        predicted={n: v for n in PREDICTED if isinstance(v := forecast.get(n), int | float)},
    )
    if run.factors.get("batch") == AUTO:  # none was found
        run.factors["batch"] = None
    if report:
        _take_report(run, report)
        # It is written once every step is timed: the process, or its supervisor, died later.
        if run.state in ("running", "init", "preempted", "interrupted"):
            run.reason = f"its state says {run.state}, but all steps were timed"
            run.state = "completed"
    elif run.state == "completed":
        run.reason = run.reason or "it has no figures"
    for name in ("gpus", "nodes", "batch"):
        value = run.factors.get(name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} = {value!r}, but it must be a whole number above 0")
    return run


def _take_report(run: Run, report: dict[str, Any]) -> None:
    """Figures and factors of benchmark.json."""
    split = report.get("step_split") or {}
    values = report | {"seconds_per_step": report["seconds_per_step"]["median"]}
    values |= {f"{part}_seconds": split.get(part) for part in _SPLIT}
    run.figures = {name: values[name] for name in FIGURES if values.get(name) is not None}
    for name, value in run.figures.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} = {value}, but it must be finite")
    run.factors |= _plain(report["factors"])
    run.factors["device"] = report.get("environment", {}).get("device", "unknown")
    config = flat(report.get("config", {}))
    run.workload = _plain({key: config[key] for key in _WORK if config.get(key) is not None})


def _line(text: str) -> str:
    """A text of limited length in one line."""
    return printable(text.replace("\n", " "))[:400]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that can be compared and sorted: lists as texts."""
    return {k: str(v) if isinstance(v, list | dict) else v for k, v in values.items()}


def _object(path: Path) -> dict[str, Any]:
    """A file's JSON object, {} if the file is not there."""
    try:
        return dict(read_json_file(path)) if path.exists() else {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} is no JSON object: {error}") from error
