"""Finds runs below folders and reads each as one row: state, factors, measured and predicted figures.

Runs are only read. What cannot be read becomes a run of the state "unreadable" with a reason.
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

from torchtitan.models.dit_tts.config.keys import marked
from torchtitan.models.dit_tts.config.marks import INPUT, WORKLOAD
from torchtitan.models.dit_tts.errors import InputError, printable, require_modules
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.run.factors import FACTORS, factors

SPLIT = ("data", "forward", "backward", "optimizer", "other", "exchange")
FIGURES = (
    "seconds_per_step",
    "samples_per_second",
    "audio_seconds_per_second",
    "tokens_per_second_per_device",
    "mfu",
    "goodput_mfu",
    "hfu",
    "tflops_per_device",
    "padding_fraction",
    "text_padding_fraction",
    "reference_padding_fraction",
    "peak_allocated_gib",
    "peak_reserved_gib",
    *(f"{part}_seconds" for part in SPLIT),
    "loss",
)
"""What is measured. Tokens per second are those of upstream's trainer, which counts no samples."""

PREDICTED = ("fits", "gib", "seconds_per_step", "samples_per_second", "mfu")
"""Of run.json's forecast, each a column `predicted_NAME`."""

COMPARED = (*FACTORS, "device")
"""What tells apart the runs of a comparison, beside the axes of their grids."""

_COLUMNS = ("name", "folder", "grid", "source", "mfu_convention", "state", "reason", "repeat")
_MARKS = ("run.json", "benchmark.json", "state.json", "metrics.jsonl")
_NOT_SEARCHED = ("checkpoint", "analysis", "trials")

DATA = marked(INPUT)
"""Runs that differ in these keys do other work for a sample"""

WORK = marked(INPUT, WORKLOAD)
"""Those keys that differ between the runs are factors, too: runs of other work are no repeats"""

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
    """what benchmark.json says of its conventions, peak and device"""

    @property
    def measured(self) -> bool:
        """Whether statistics may use it: it has factors and a throughput, and did not fail. Of a
        benchmark only benchmark.json counts: its logged steps were timed otherwise."""
        ended = self.state in ("completed", "running", "preempted", "interrupted", "unknown")
        timed = self.source == "benchmark" or self.factors.get("lengths") == "data"
        return ended and timed and "samples_per_second" in self.figures

    def row(self, axes: Sequence[str]) -> dict[str, Any]:
        """All columns; `axes` are those of `extra_axes`."""
        return {
            **{name: getattr(self, name) for name in _COLUMNS},
            **{name: self.factors.get(name) for name in (*COMPARED, *axes)},
            **{name: self.figures.get(name) for name in FIGURES},
            **{f"predicted_{name}": self.predicted.get(name) for name in PREDICTED},
        }


def extra_axes(runs: Sequence[Run]) -> list[str]:
    """Axes of grids that are not in COMPARED."""
    return sorted({name for run in runs for name in run.factors} - set(COMPARED))


# Finding


def find_runs(paths: Sequence[str]) -> list[Run]:
    """Every run in or below the folders, each once, in the order of their names.

    Raises:
        InputError: a path is no folder, or there is no run at all.
    """
    found: dict[str, Run] = {}
    for path in paths:
        top = os.path.abspath(os.path.expanduser(path))
        if not os.path.isdir(top):
            raise InputError(f"RUNS = {path}, but no folder is there; give folders of runs")
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
            f"RUNS = {' '.join(map(str, paths))}, but no run is in there: a run has {', '.join(_MARKS)} "
            "or TensorBoard's event files; give folders of runs"
        )
    _add_workload(list(found.values()))
    return sorted(found.values(), key=lambda run: run.folder)


def _add_workload(runs: Sequence[Run]) -> None:
    """Makes factors of the keys of WORK that differ between runs, where no axis of a grid is one."""
    for key in WORK:
        values = {run.workload[key] for run in runs if key in run.workload}
        for run in runs if len(values) > 1 else ():
            if key in run.workload:
                run.factors.setdefault(key, run.workload[key])


def _workload(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key in WORK:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[key] = value if isinstance(value, bool | int | float) else _text(value)
    return found


def read_run(folder: str, top: str) -> Run:
    """One run, whose name is its folder's relative to `top` where no file names it."""
    name = os.path.relpath(folder, top)
    run = Run(_text(folder), _text(os.path.basename(top) if name == "." else name))
    try:
        _read(run, Path(folder))
    except Exception as error:  # whatever stands in the files, the other runs are analysed
        what = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, RecursionError):
            what = "it is nested too deep"
        run.state, run.reason = "unreadable", _text(what or type(error).__name__)
        run.factors, run.figures, run.predicted, run.source = {}, {}, {}, ""
        if isinstance(error, OSError) and error.filename:
            run.reason = f"{_text(os.path.basename(error.filename))}: {run.reason}"
    return run


def _read(run: Run, folder: Path) -> None:
    grid_run, report, state = (
        _object(folder / name) for name in ("run.json", "benchmark.json", "state.json")
    )
    _set_state(run, grid_run, report, state)
    if grid_run:
        run.name = _text(grid_run.get("name") or run.name)
        run.grid = _text(grid_run.get("grid") or "")
        run.repeat = grid_run.get("repeat")
        if run.repeat is not None and type(run.repeat) is not int:
            raise ValueError(f"run.json: repeat = {run.repeat!r}, but it must be an integer")
        run.factors = _factors("run.json", grid_run.get("factors") or {})
    if report:
        run.source, run.mfu_convention = "benchmark", "exact"
        run.name = _text(grid_run.get("name") or report.get("run_name") or run.name)
        _read_report(run, report)
    elif rows := _metrics(folder / "metrics.jsonl"):
        run.source, run.mfu_convention = "metrics", "exact"
        run.figures = _of_series({name: [row.get(name) for row in rows] for name in rows[-1]})
    elif series := _tensorboard(folder):
        run.source = "tensorboard"
        run.mfu_convention = "upstream" if series.keys() & _UPSTREAM_TAGS.keys() else "exact"
        run.figures = _of_series(series)
    elif not grid_run and run.state == "unknown":
        raise ValueError("it has no figures: neither metrics.jsonl nor event files hold any")
    if run.state == "completed" and not run.figures:
        run.reason = run.reason or "it has no figures"
    if run.figures and "size" not in run.factors:
        _factors_of_config(run, folder)
    environment = _object(folder / "env.json")
    if run.factors and environment:
        run.factors.setdefault("device", _device(environment))
    _predict(run, grid_run.get("forecast"))


def _set_state(run: Run, grid_run: dict, report: dict, state: dict) -> None:
    """run.json's state, else state.json's. benchmark.json is written once every step is timed: with it
    a run that still says it runs (the process died later, or its supervisor) is complete."""
    said = grid_run or state
    run.state = _text(said.get("state", "completed" if report else "unknown"))
    run.reason = _text(said.get("reason") or said.get("error") or state.get("error") or "")
    if report and run.state in ("running", "init"):
        run.reason = f"its state says {run.state}, but all steps were timed"
        run.state = "completed"


# Reading one file


def _text(value: Any) -> str:
    """A text that terminals, UTF-8 and SVG can hold, of limited length."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return printable(text.replace("\n", " "))[:_MAX_TEXT]


def _object(path: Path) -> dict[str, Any]:
    """A file's JSON object, {} if the file is not there.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    if not os.path.lexists(path):
        return {}
    if not path.is_file():
        raise ValueError(f"{path.name} is no file")
    content = path.read_bytes()
    if not content:
        raise ValueError(f"{path.name} is empty")
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def _number(where: str, value: Any, least: float = 0.0, above: bool = False) -> float:
    """A finite number of at least `least` (or above it).

    Raises:
        ValueError: it is anything else.
    """
    number = type(value) in (int, float) and abs(value) < 1e300
    if not number or value < least or (above and value == least):
        limit = "" if math.isinf(least) else f" {'above' if above else 'of at least'} {least:g}"
        raise ValueError(f"{where} = {value!r:.60}, but it must be a finite number{limit}")
    return float(value)


def _figure(where: str, name: str, value: Any) -> float:
    if name == "loss":
        return _number(where, value, -math.inf)
    return _number(where, value, above=name in ("seconds_per_step", "samples_per_second"))


def _factors(where: str, values: Any) -> dict[str, Any]:
    """Factors and axes as texts, numbers and truth values; lists as texts."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}: factors is no object")
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _COLUMNS or name in FIGURES or name.startswith("predicted_"):
            raise ValueError(f"{where}: a factor is named {name!r:.60}, as a column is")
        if name in _COUNTS and (type(value) is not int or value < 1):
            raise ValueError(f"{where}: {name} = {value!r:.60}, but it must be a positive integer")
        if isinstance(value, float):
            _number(f"{where}: {name}", value, -math.inf)
        plain = isinstance(value, bool | int | float)
        found[_text(name)] = value if plain or value is None else _text(value)
    return found


def _read_report(run: Run, report: dict[str, Any]) -> None:
    """Figures, factors and notes of benchmark.json."""
    for name in ("seconds_per_step", "samples_per_second", "mfu", "gpus"):
        if name not in report:
            raise ValueError(f"benchmark.json has no {name}")
    weighted = report.get("weighted") or {}
    split = report.get("step_split") or {}
    values = report | {
        "seconds_per_step": report["seconds_per_step"]["median"],
        "tokens_per_second_per_device": None,
        **{f"{part}_seconds": split.get(part) for part in SPLIT},
        **{name: value for name, value in weighted.items() if value is not None},
    }
    for name in FIGURES:
        if values.get(name) is not None:
            run.figures[name] = _figure(f"benchmark.json: {name}", name, values[name])
    if measured := report.get("factors"):
        measured = _factors("benchmark.json", measured)
    else:
        measured = factors(report["config"], report["gpus"], report["gpus_per_node"])
    for name, value in measured.items():
        if run.factors.get(name, value) != value:
            run.reason = f"{name} is {run.factors[name]} in run.json, {value} in benchmark.json"
    run.factors |= measured | {"device": _device(report.get("environment", {}))}
    run.workload = _workload(report.get("config", {}))
    missing = [name for name in FACTORS if run.factors.get(name) is None]
    if missing:
        raise ValueError(f"benchmark.json: factors has no {missing[0]}")
    peak = report.get("peak_tflops")
    run.notes = {
        "conventions": {
            _text(each["convention"]): _text(each["counts"])
            for each in report.get("conventions", [])
        },
        "peak": None if peak is None else _number("benchmark.json: peak_tflops", peak, above=True),
        "compiles": _number("benchmark.json: compiles", report.get("compiles_while_timed", 0)),
        **{
            name: _text(report.get(name) or "")
            for name in ("conventions_note", "hfu_note", "attention_note", "step_split_note")
        },
    }


def _device(environment: Mapping[str, Any]) -> str:
    """The device as its driver names it."""
    return _text(environment.get("device", "unknown"))


def _metrics(path: Path) -> list[dict[str, Any]]:
    if not os.path.lexists(path):
        return []
    if not path.is_file():
        raise ValueError(f"{path.name} is no file")
    return JsonLines(path).read()


def _tensorboard(folder: Path) -> dict[str, list[Any]]:
    """Tag -> values of the event files in the folder or below it; none if there are no files."""
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
        # in the order of the steps
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
        if name == "loss":  # that of a bad step
            values = [value for value in values if math.isfinite(value)]
        known = [factor * _figure(f"logged {name}", name, value) for value in values]
        if not known:
            continue
        if name == "loss":
            figures[name] = known[-1]
        else:
            figures[name] = max(known) if name.startswith("peak_") else median(known[1:] or known)
    return figures


def _factors_of_config(run: Run, folder: Path) -> None:
    """Factors of a training run from config.toml and env.json; without them it is only listed."""
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
        environment = _object(folder / "env.json")
        gpus = (environment["world_size"], environment["gpus_per_node"])
        run.factors |= _factors("config.toml", factors(config, *gpus))
        run.workload = _workload(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        run.reason = run.reason or _text(
            f"its factors are not known: {type(error).__name__}: {error}"
        )


def _predict(run: Run, forecast: Any) -> None:
    """run.json's forecast."""
    for name in PREDICTED:
        value = (forecast or {}).get(name)
        if value is not None:
            fits = name == "fits" and isinstance(value, bool)
            run.predicted[name] = value if fits else _number(f"predicted {name}", value)
