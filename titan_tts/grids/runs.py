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

SPLIT = ("data", "forward", "backward", "optimizer", "other", "exchange")
FIGURES = (
    *("seconds_per_step", "samples_per_second", "audio_seconds_per_second"),
    *("mfu", "goodput_mfu", "hfu", "tflops_per_device"),
    *("padding_fraction", "text_padding_fraction", "reference_padding_fraction"),
    *("peak_allocated_gib", "peak_reserved_gib"),
    *(f"{part}_seconds" for part in SPLIT),
    "loss",
)

PREDICTED = ("fits", "gib", "seconds_per_step", "samples_per_second", "mfu")
"""Of run.json's forecast, each a column `predicted_NAME`."""

COMPARED = (*FACTORS, "device")
"""Factors that distinguish the runs of a comparison; the axes of their grids are further ones."""

COLUMNS = ("name", "folder", "grid", "source", "state", "reason", "repeat")
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
    source: str = ""
    """benchmark; empty without figures"""

    grid: str = ""
    repeat: int | None = None
    factors: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    peak_tflops: float | None = None
    compiles: int = 0
    """while it was timed"""

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
        denied: list[OSError] = []
        for folder, below, files in os.walk(top, onerror=denied.append):
            below[:] = sorted(name for name in below if name not in _NOT_SEARCHED)
            if any(name in _MARKS for name in files):
                below.clear()  # whatever is in it belongs to the run
                found.setdefault(os.path.realpath(folder), read_run(folder, top))
        for error in denied:
            name = os.path.relpath(error.filename, top)
            run = Run(error.filename, name, "unreadable", f"folder: {error.strerror}")
            found.setdefault(os.path.realpath(error.filename), run)
    if not found:
        raise InputError(
            f"RUNS = {' '.join(map(str, paths))}, but none contains a benchmark ({' or '.join(_MARKS)}); "
            "give run folders"
        )
    _add_workload(list(found.values()))
    return sorted(found.values(), key=lambda run: run.folder)


def _add_workload(runs: Sequence[Run]) -> None:
    """Makes factors of the keys of _WORK that differ between runs, where no axis of a grid is one."""
    for key in _WORK:
        having = [run for run in runs if key in run.workload]
        if len({run.workload[key] for run in having}) > 1:
            for run in having:
                run.factors.setdefault(key, run.workload[key])


def read_run(folder: str, top: str) -> Run:
    """One run; where no file names it, its name is the folder's relative to `top`."""
    name = os.path.relpath(folder, top)
    run = Run(folder, os.path.basename(top) if name == "." else name)
    try:
        _read(run, Path(folder))
    except Exception as error:  # whatever the files hold, the other runs are analysed
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename:
            reason = f"{os.path.basename(error.filename)}: {error.strerror}"
        return Run(run.folder, run.name, "unreadable", _line(reason))
    return run


def _read(run: Run, folder: Path) -> None:
    """Reads run.json's state and factors, or else state.json's, and the figures of benchmark.json."""
    record, report, state = (
        _object(folder / f"{name}.json") for name in ("run", "benchmark", "state")
    )
    said = record or state
    run.name = record.get("name") or report.get("run_name") or run.name
    run.grid, run.repeat = record.get("grid") or "", record.get("repeat")
    run.state = said.get("state", "completed" if report else "unknown")
    run.reason = _line(said.get("reason") or said.get("error") or state.get("error") or "")
    run.factors = _plain(record.get("factors") or {})
    if run.factors.get("batch") == AUTO:  # none was found
        run.factors["batch"] = None
    if report:
        _read_report(run, report)
    elif run.state == "completed":
        run.reason = run.reason or "it has no figures"
    # benchmark.json is written once every step is timed: the process, or its supervisor, died later.
    if report and run.state in ("running", "init", "preempted", "interrupted"):
        run.reason = f"its state says {run.state}, but all steps were timed"
        run.state = "completed"
    forecast = record.get("forecast") or {}
    run.predicted = {n: forecast[n] for n in PREDICTED if forecast.get(n) is not None}


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


def _read_report(run: Run, report: dict[str, Any]) -> None:
    """Figures and factors of benchmark.json."""
    run.source = "benchmark"
    split = report.get("step_split") or {}
    weighted = {k: v for k, v in (report.get("weighted") or {}).items() if v is not None}
    values = report | {"seconds_per_step": report["seconds_per_step"]["median"]}
    values |= {f"{part}_seconds": split.get(part) for part in SPLIT} | weighted
    run.figures = {name: values[name] for name in FIGURES if values.get(name) is not None}
    for name, value in run.figures.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} = {value}, but it must be finite")
    run.factors |= report["factors"]
    run.factors["device"] = report.get("environment", {}).get("device", "unknown")
    config = flat(report.get("config", {}))
    run.workload = _plain({key: config[key] for key in _WORK if config.get(key) is not None})
    run.peak_tflops = report.get("peak_tflops")
    run.compiles = report.get("compiles_while_timed", 0)
