"""Finds runs below folders and reads each as one row: state, factors, measured and predicted figures.

Runs are only read. A run whose files cannot be read has the state "unreadable" and a reason.
"""

import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from titan_tts.grids.grid_file import AUTO, flat
from torchtitan.models.dit_tts.config.keys import marked
from torchtitan.models.dit_tts.config.marks import INPUT, WORKLOAD
from torchtitan.models.dit_tts.errors import InputError, printable, require_modules
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.run.factors import FACTORS, factors

SPLIT = ("data", "forward", "backward", "optimizer", "other", "exchange")
FIGURES = (
    *("seconds_per_step", "samples_per_second", "audio_seconds_per_second"),
    *("tokens_per_second_per_device", "mfu", "goodput_mfu", "hfu", "tflops_per_device"),
    *("padding_fraction", "text_padding_fraction", "reference_padding_fraction"),
    *("peak_allocated_gib", "peak_reserved_gib"),
    *(f"{part}_seconds" for part in SPLIT),
    "loss",
)
"""Measured figures. Tokens per second are from upstream's trainer, which counts no samples."""

PREDICTED = ("fits", "gib", "seconds_per_step", "samples_per_second", "mfu")
"""Of run.json's forecast, each a column `predicted_NAME`."""

COMPARED = (*FACTORS, "device")
"""Factors that distinguish the runs of a comparison; the axes of their grids are further ones."""

COLUMNS = ("name", "folder", "grid", "source", "mfu_convention", "state", "reason", "repeat")
_MARKS = ("run.json", "benchmark.json", "state.json", "metrics.jsonl")
_NOT_SEARCHED = ("checkpoint", "analysis", "trials")

DATA = marked(INPUT)
"""Keys that decide how much work a sample is."""

WORK = marked(INPUT, WORKLOAD)
"""Keys that become factors where runs differ in them: runs of other work are no repeats."""

_EVENTS = "events.out.tfevents."
_COUNTS = ("tensor_parallel", "gpus", "nodes", "batch", "accumulation")
_MAX_TEXT = 400

# Tag of upstream's MetricsProcessor -> (figure, factor). Ours are grouped names of metrics.jsonl.
_UPSTREAM_TAGS = {
    "throughput(tps)": ("tokens_per_second_per_device", 1.0),
    "mfu(%)": ("mfu", 0.01),
    "tflops": ("tflops_per_device", 1.0),
    "memory/max_active(GiB)": ("peak_allocated_gib", 1.0),
    "memory/max_reserved(GiB)": ("peak_reserved_gib", 1.0),
    "time_metrics/end_to_end(s)": ("seconds_per_step", 1.0),
    "loss_metrics/global_avg_loss": ("loss", 1.0),
}


@dataclass
class Run:
    """One run; a key that is missing in `factors`, `figures` or `predicted` is not known."""

    folder: str
    name: str
    state: str = "unknown"
    reason: str = ""
    source: str = ""
    """benchmark, metrics or tensorboard; empty without figures"""
    mfu_convention: str = ""
    """exact, as model/flops.py counts, or upstream, as upstream's trainer counts tokens"""
    grid: str = ""
    repeat: int | None = None
    factors: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    """value of each key of WORK, lists as text"""
    notes: dict[str, Any] = field(default_factory=dict)
    """conventions, peak and compilations that benchmark.json states"""

    @property
    def measured(self) -> bool:
        """Whether statistics may use it: it has factors and a throughput, and did not fail. Of a
        benchmark only benchmark.json counts: its logged steps were timed otherwise."""
        ended = self.state in ("completed", "running", "preempted", "interrupted", "unknown")
        timed = self.source == "benchmark" or self.factors.get("lengths") == "data"
        return ended and timed and "samples_per_second" in self.figures

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
            if any(name in _MARKS or name.startswith(_EVENTS) for name in files):
                below.clear()  # tb/ and whatever else is in it belong to the run
                found.setdefault(os.path.realpath(folder), read_run(folder, top))
        for error in denied:
            name = _text(os.path.relpath(error.filename, top))
            run = Run(_text(error.filename), name, "unreadable", f"folder: {error.strerror}")
            found.setdefault(os.path.realpath(error.filename), run)
    if not found:
        raise InputError(
            f"RUNS = {' '.join(map(str, paths))}, but none contains a run: a run has {', '.join(_MARKS)} "
            "or TensorBoard's event files; give run folders"
        )
    _add_workload(list(found.values()))
    return sorted(found.values(), key=lambda run: run.folder)


def _add_workload(runs: Sequence[Run]) -> None:
    """Makes factors of the keys of WORK that differ between runs, where no axis of a grid is one."""
    for key in WORK:
        having = [run for run in runs if key in run.workload]
        if len({run.workload[key] for run in having}) > 1:
            for run in having:
                run.factors.setdefault(key, run.workload[key])


def read_run(folder: str, top: str) -> Run:
    """One run; where no file names it, its name is the folder's relative to `top`."""
    name = os.path.relpath(folder, top)
    run = Run(_text(folder), _text(os.path.basename(top) if name == "." else name))
    try:
        _read(run, Path(folder))
    except Exception as error:  # whatever the files hold, the other runs are analysed
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename:
            reason = f"{os.path.basename(error.filename)}: {error.strerror}"
        return Run(run.folder, run.name, "unreadable", _text(reason))
    return run


def _read(run: Run, folder: Path) -> None:
    record, report, state, environment = (
        _object(folder / f"{name}.json") for name in ("run", "benchmark", "state", "env")
    )
    _set_state(run, record, report, state)
    run.name = _text(record.get("name") or report.get("run_name") or run.name)
    run.grid, run.repeat = _text(record.get("grid") or ""), record.get("repeat")
    given = record.get("factors") or {}
    if given.get("batch") == AUTO:  # none was found
        given = given | {"batch": None}
    run.factors = _factors("run.json", given)
    if report:
        run.source, run.mfu_convention = "benchmark", "exact"
        _read_report(run, report)
    elif rows := JsonLines(folder / "metrics.jsonl").read():
        run.source, run.mfu_convention = "metrics", "exact"
        run.figures = _of_series({name: [row.get(name) for row in rows] for name in rows[-1]})
    elif series := _tensorboard(folder):
        run.source = "tensorboard"
        run.mfu_convention = "upstream" if series.keys() & _UPSTREAM_TAGS.keys() else "exact"
        run.figures = _of_series(series)
    elif not record and run.state == "unknown":
        raise ValueError("it has no figures: neither metrics.jsonl nor event files hold any")
    if run.state == "completed" and not run.figures:
        run.reason = run.reason or "it has no figures"
    if run.figures and "size" not in run.factors:
        _read_config(run, folder, environment)
    if run.factors and environment:
        run.factors.setdefault("device", _device(environment))
    forecast = record.get("forecast") or {}
    for name in PREDICTED:
        value = forecast.get(name)
        if value is not None:
            fits = name == "fits" and isinstance(value, bool)
            run.predicted[name] = value if fits else _figure("run.json: forecast", name, value)


def _set_state(run: Run, record: dict, report: dict, state: dict) -> None:
    """run.json's state, else state.json's. benchmark.json is written once every step is timed: with it
    a run that still says it runs (the process died later, or its supervisor) is complete."""
    said = record or state
    run.state = _text(said.get("state", "completed" if report else "unknown"))
    run.reason = _text(said.get("reason") or said.get("error") or state.get("error") or "")
    if report and run.state in ("running", "init"):
        run.reason = f"its state says {run.state}, but all steps were timed"
        run.state = "completed"


def _text(value: Any) -> str:
    """A text that terminals, UTF-8 and SVG can hold, of limited length."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return printable(text.replace("\n", " "))[:_MAX_TEXT]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as texts, numbers and truth values; lists as texts."""
    return {
        _text(name): value
        if value is None or isinstance(value, bool | int | float)
        else _text(value)
        for name, value in values.items()
    }


def _factors(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Factors that can be sorted and multiplied, none named like a column of a row; ValueError for others."""
    found = _plain(values)
    for name, value in found.items():
        if name in (*COLUMNS, *FIGURES) or name.startswith("predicted_"):
            raise ValueError(f"{where}: a factor is named {name!r:.60}, as a column is")
        if name in _COUNTS and value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{where}: {name} = {value!r:.60}, but it must be a positive integer")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {name} = {value!r:.60}, but it must be finite")
    return found


def _object(path: Path) -> dict[str, Any]:
    """A file's JSON object, {} if the file is not there."""
    if not os.path.lexists(path):
        return {}
    if not path.is_file():  # a FIFO may have no end
        raise ValueError(f"{path.name} is not a file")
    content = path.read_bytes()
    if not content:
        raise ValueError(f"{path.name} is empty")
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def _figure(where: str, name: str, value: Any) -> float:
    """A finite number; only losses may be negative, and steps take time. Raises ValueError for others."""
    positive = name in ("seconds_per_step", "samples_per_second")
    number = type(value) in (int, float) and math.isfinite(value)
    if not number or (positive and value <= 0) or (name != "loss" and value < 0):
        limit = " above 0" if positive else "" if name == "loss" else " of at least 0"
        raise ValueError(f"{where}: {name} = {value!r:.60}, but it must be a finite number{limit}")
    return float(value)


def _read_report(run: Run, report: dict[str, Any]) -> None:
    """Figures, factors and notes of benchmark.json."""
    split = report.get("step_split") or {}
    weighted = {k: v for k, v in (report.get("weighted") or {}).items() if v is not None}
    values = report | {
        "seconds_per_step": report["seconds_per_step"]["median"],
        "tokens_per_second_per_device": None,
        **{f"{part}_seconds": split.get(part) for part in SPLIT},
        **weighted,
    }
    for name in FIGURES:
        if values.get(name) is not None:
            run.figures[name] = _figure("benchmark.json", name, values[name])
    config = report.get("config", {})
    # Reports of the first grids have no factors.
    known = report.get("factors") or factors(config, report["gpus"], report["gpus_per_node"])
    run.factors |= _factors("benchmark.json", known)
    run.factors["device"] = _device(report.get("environment", {}))
    if missing := [name for name in FACTORS if run.factors.get(name) is None]:
        raise ValueError(f"benchmark.json: factors has no {missing[0]}")
    run.workload = _workload(config)
    peak = report.get("peak_tflops")
    notes = ("conventions_note", "hfu_note", "attention_note", "step_split_note")
    run.notes = {
        "conventions": {
            _text(each["convention"]): _text(each["counts"])
            for each in report.get("conventions", [])
        },
        "peak": None if peak is None else _figure("benchmark.json", "peak_tflops", peak),
        "compiles": _figure("benchmark.json", "compiles", report.get("compiles_while_timed", 0)),
        **{name: _text(report.get(name) or "") for name in notes},
    }


def _workload(config: Mapping[str, Any]) -> dict[str, Any]:
    """Value of each key of WORK that the config has."""
    values = flat(config) if isinstance(config, Mapping) else {}
    return _plain({key: values[key] for key in WORK if values.get(key) is not None})


def _device(environment: Mapping[str, Any]) -> str:
    """The device as its driver names it."""
    return _text(environment.get("device", "unknown"))


def _tensorboard(folder: Path) -> dict[str, list[Any]]:
    """Tag -> values, by step, of the event files in the folder or below it; none without files."""
    holders = []
    for holder, below, files in os.walk(folder):
        below[:] = [name for name in below if name not in _NOT_SEARCHED]
        if any(name.startswith(_EVENTS) for name in files):
            holders.append(holder)
    if not holders:
        return {}
    require_modules("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(max(holders), size_guidance={"scalars": 0})  # named by date: the last
    events.Reload()
    return {
        tag.removeprefix("speed/"): [each.value for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def _of_series(series: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Figures of logged values: medians after the first, which compiles, if there are more; of memory
    the maximum, of the loss the last."""
    renamed = {name: (values, 1.0) for name, values in series.items() if name in FIGURES}
    for tag, (name, factor) in _UPSTREAM_TAGS.items():
        if tag in series:
            renamed[name] = (series[tag], factor)
    if "peak_memory_gib" in series:  # the trainer's name of it
        renamed["peak_reserved_gib"] = (series["peak_memory_gib"], 1.0)
    figures = {}
    for name, (values, factor) in renamed.items():
        values = [value for value in values if value is not None]
        if name == "loss":  # a bad step's is not finite
            values = [value for value in values if math.isfinite(value)]
        known = [factor * _figure("logged", name, value) for value in values]
        if known and name == "loss":
            figures[name] = known[-1]
        elif known:
            figures[name] = max(known) if name.startswith("peak_") else median(known[1:] or known)
    return figures


def _read_config(run: Run, folder: Path, environment: Mapping[str, Any]) -> None:
    """Factors of a training run from config.toml and env.json; without them it is only listed."""
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
        gpus = environment["world_size"], environment["gpus_per_node"]
        run.factors |= _factors("config.toml", factors(config, *gpus))
        run.workload = _workload(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        why = f"its factors are not known: {type(error).__name__}: {error}"
        run.reason = run.reason or _text(why)
