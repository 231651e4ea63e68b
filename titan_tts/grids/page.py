"""The page of an analysis: best configurations, verdicts, effects, scaling and every run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from titan_tts.grids.effects import LARGEST_FALL, NO_ALTERNATIVES, SPEED
from titan_tts.grids.runs import COLUMNS, FIGURES
from titan_tts.report.page import Cell, Figure, Kind, Note, Page, Part, Section, Table
from titan_tts.report.words import counted, number

UNITS = {
    "samples_per_second": "samples/s",
    "audio_seconds_per_second": "seconds of audio per second",
    "seconds_per_step": "s/step",
    "mfu": "MFU %",
    "goodput_mfu": "goodput MFU %",
    "hfu": "HFU %",
    "tflops_per_device": "TFLOP/s per device",
    "peak_tflops": "peak TFLOP/s",
    "peak_allocated_gib": "allocated GiB",
    "peak_reserved_gib": "reserved GiB",
    "loss": "loss",
}
"""Figure -> the head of its column, and the label of its axis"""

_NAMELESS = (*NO_ALTERNATIVES, "backend", "layout", "precision", "optimizer")
"""Factors whose level says enough without their name"""
_UNSAID = {"backend": "torchtitan", "tensor_parallel": 1, "accumulation": 1}
_NOUNS = {"gpus": "GPU", "nodes": "node"}


def short_name(figure: str) -> str:
    return UNITS[figure].removesuffix(" %")


def figure_text(name: str, value: float | None) -> str:
    """A figure in the unit of UNITS."""
    if value is not None and UNITS[name].endswith("%"):
        value *= 100
    return number(value)


def _level(name: str, value: Any) -> str:
    """compile default, 8 GPUs, fsdp"""
    if value is None:
        return f"{name} not given"
    if name in _NOUNS:
        return counted(value, _NOUNS[name])
    return str(value) if name in _NAMELESS else f"{name} {value}"


def label(row: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """A row's levels of `names`, or all, in a line; usual ones (_UNSAID) only if there are no others."""
    levels = [(name, row[name]) for name in (row if names is None else names)]
    said = [level for level in levels if level not in _UNSAID.items()]
    return ", ".join(_level(*level)[:48] for level in said or levels) or "all runs"


Content = Mapping[str, Any]
_Row = list[str | Cell]

_BADGES: dict[str, Kind] = {
    **dict.fromkeys(("pass", "completed"), "good"),
    **dict.fromkeys(("fail", "oom", "failed", "unreadable", "timeout"), "error"),
}

_MFU = (
    "MFU: training FLOPs of the padded shapes, attention over all keys, without what activation checkpointing repeats, over the "
    "device's dense bf16 peak. Goodput MFU counts real lengths only, HFU what is repeated, too."
)
_EFFECTS = (
    "Change by one level against another, for each model size. At equal batch: mean over pairs of cells equal in every other "
    "factor, the micro-batch too. At best batches: both sides where they are fastest. Range: the smallest and largest effect over "
    "the pairs."
)
_SCALING = (
    "At equal micro-batch and configuration. Efficiency is throughput per GPU over that at the smallest number of GPUs; a run on "
    "one data-parallel rank begins the curve of every layout. The ideal MFU is that at the smallest number of GPUs."
)


def analysis_page(generator: str, content: Content, plots: Mapping[str, dict[str, Any]]) -> Page:
    """The page of `analyse`'s content and `draw_all`'s plots. Another analysis recognizes it by `generator`."""

    def drawn(*names: str) -> list[Part]:
        return [Figure(plots[name]["title"], plots[name]["svg"]) for name in names if name in plots]

    verdicts = [
        (Cell(kind, badge=_BADGES.get(kind, "note")), text) for kind, text in _verdicts(content)
    ]
    sections: dict[str, list[Part]] = {
        "Best configuration": [*_best(content)],
        "Verdicts": [Table((), verdicts, left=(0, 1))],
        "How MFU is counted": [_MFU],
        "Over the micro-batch": drawn(*(name for name in plots if name.endswith("_over_batch"))),
        "Effects": [*_effects(content)],
        "Scaling": [*_scaling(content), *drawn("scaling")],
        "All runs": [*_all_runs(content)],
    }
    constant = content["constant"]
    return Page(
        f"Analysis of {counted(len(content['all']), 'run')}",
        [
            Section(title, parts, on_terminal=title in ("Best configuration", "Verdicts"))
            for title, parts in sections.items()
            if parts
        ],
        cards={state: str(count) for state, count in content["states"].items()},
        about=f"Alike in all that were measured: {label(constant)}." if constant else "",
        data={"format": 1} | {name: each for name, each in content.items() if name != "rows"},
        generator=generator,
    )


def _change(value: float | None) -> str:
    """A ratio as a change in percent: 1.093 -> +9.3 %."""
    return "-" if value is None else f"{100 * (value - 1):+.1f} %"


def _span(low: float | None, high: float | None) -> str:
    """Two ratios as changes: +3.1 to +4.5 %."""
    return "-" if low is None else f"{_change(low).removesuffix(' %')} to {_change(high)}"


def _figures(row: Mapping[str, Any], names: Sequence[str]) -> list[Cell]:
    return [Cell(figure_text(name, row[name]), value=row[name]) for name in names]


def _best(content: Content) -> Iterator[Part]:
    if not content["best"]:
        yield "No run has both factors and samples/s."
        return
    figures = [name for name in UNITS if name in content["best"][0]]
    rows: list[_Row] = [
        [label(row, content["names"]), str(row["runs"]), *_figures(row, figures)]
        for row in content["best"]
    ]
    head = ("configuration", "runs", *(UNITS[name] for name in figures))
    yield Table(head, rows, max_rows=30, rest="in summary.json")
    yield Note("Highest mean of samples/s for each size, device, number of GPUs, lengths and data.")


def _verdicts(content: Content) -> Iterator[tuple[str, str]]:
    """(verdict, what it is about); the verdict is pass, fail, cannot tell or note."""
    growth, (deviation, degrees) = content["growth"], content["deviation"]
    text = "no configuration was run at two batches"
    if growth["pairs"]:
        text = f"{len(growth['falls'])} of {growth['pairs']} steps to the next batch fall by more than {LARGEST_FALL:.0%}"
    if growth["falls"]:
        worst = min(growth["falls"], key=lambda fall: fall["ratio"])
        text += f", most by {_change(worst['ratio'])}: {label(worst['configuration'])}, "
        text += f"batch {worst['batch']} to {worst['next_batch']}"
    yield growth["verdict"], f"samples/s does not fall with a larger batch: {text}"
    if degrees:
        said = f"{100 * deviation:.2f} % of samples/s, {degrees} degrees of freedom"
        yield "note", f"standard deviation of repeats: {said}"
    if compiled := sum(bool(row["compiles_while_timed"]) for row in content["all"]):
        runs = counted(compiled, "run")
        yield "fail", f"{runs} compiled while being timed; raise [benchmark] warmup_steps"


def _effects(content: Content) -> Iterator[Part]:
    tables = {figure: rows for figure, rows in content["effects"].items() if rows}
    yield _EFFECTS if tables else "No factor varies besides batch and GPUs."
    for figure, effects in tables.items():
        sides = {"equal_batch": "at equal batch", "best_batch": "at best batches"}
        if figure != SPEED:
            del sides["best_batch"]
        head = ["size", "factor", "level", "against"]
        head += [text for side in sides.values() for text in (side, "range", "pairs")]
        rows: list[_Row] = []
        for row in effects:
            if row["equal_batch"]["pairs"] or row["best_batch"]["pairs"]:
                factors = ", ".join([row["factor"], *row["together"]])
                cells = [str(row["size"]), factors, str(row["level"]), str(row["base"])]
                rows.append([*cells, *(cell for side in sides for cell in _estimate(row[side]))])
        yield Table(head, rows, title=UNITS[figure], left=range(4), sortable=True)


def _estimate(found: Mapping[str, Any]) -> _Row:
    return [
        Cell(_change(found["ratio"]), value=found["ratio"]),
        _span(found["smallest"], found["largest"]),
        str(found["pairs"]),
    ]


def _scaling(content: Content) -> Iterator[Part]:
    rows: list[_Row] = []
    for curve in content["scaling"]:
        first = curve["points"][0]
        for point in curve["points"]:
            name = label(curve["configuration"]) if point is first else ""
            cells = [name, str(point["gpus"]), str(point["nodes"])]
            cells += [number(point[SPEED]), f"{100 * point['efficiency']:.1f} %"]
            rows.append([*cells, *(figure_text("mfu", each["mfu"]) for each in (point, first))])
    if rows:
        head = ("configuration", "GPUs", "nodes", "samples/s", "efficiency", "MFU %", "ideal MFU %")
        yield _SCALING
        yield Table(head, rows, rest="in summary.json")


def _all_runs(content: Content) -> Iterator[Part]:
    """Yield the table of all runs, sorted by samples/s, those without any last: the factors that vary, and the figures that any run has."""
    runs = content["all"]
    known = (*COLUMNS, *FIGURES)
    factors = [
        name
        for name in runs[0]
        if name not in known
        and not name.startswith("predicted_")
        and len({row[name] for row in runs if row[name] is not None}) > 1
    ]
    figures = [name for name in UNITS if any(row[name] is not None for row in runs)]
    head = ["name", "state", *factors, "repeat", *(UNITS[name] for name in figures), "reason"]
    rows: list[_Row] = []
    for row in sorted(runs, key=lambda row: -(row[SPEED] or 0.0)):
        state = Cell(row["state"], badge=_BADGES.get(row["state"], "note"))
        levels = ("-" if row[name] is None else str(row[name]) for name in (*factors, "repeat"))
        rows.append([row["name"], state, *levels, *_figures(row, figures), row["reason"]])
    yield Note("A column's head sorts by it. summary.csv has every column.")
    yield Table(head, rows, left=(0, 1, len(head) - 1), sortable=True, rest="in summary.csv")
