"""The page of an analysis: best configurations, verdicts, effects, scaling and every run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from titan_tts.grids.labels import UNITS, label
from titan_tts.grids.runs import COLUMNS, FIGURES
from titan_tts.grids.verdicts import WITHOUT_REPEATS
from titan_tts.report.page import Cell, Figure, Kind, Note, Page, Part, Section, Table
from titan_tts.report.words import counted, number

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
    "the pairs. Small figures are intervals of 95 % by the variance of repeats, about the mean over just these pairs."
)
_SCALING = (
    "At equal micro-batch and configuration. Efficiency is throughput per GPU over that at the smallest number of GPUs; a run on "
    "one data-parallel rank begins the curve of every layout. The ideal MFU is that at the smallest number of GPUs."
)


def analysis_page(generator: str, content: Content, plots: Mapping[str, dict[str, Any]]) -> Page:
    """The page of `analyse`'s content and `draw_all`'s plots. Another analysis recognizes it by `generator`."""

    def drawn(*names: str) -> list[Part]:
        return [Figure(plots[name]["title"], plots[name]["svg"]) for name in names if name in plots]

    sections = [Section("Best configuration", [*_best(content), *drawn("configurations")])]
    if lines := [
        (Cell(kind, badge=_BADGES.get(kind, "note")), text) for kind, text in _verdicts(content)
    ]:
        sections.append(Section("Verdicts", [Table((), lines, left=(0, 1))]))
    curves = drawn(*(name for name in plots if name.endswith("_over_batch")))
    peaks = (f"{text} ({counted(count, 'run')})" for text, count in content["peaks"].items())
    more: dict[str, list[Part]] = {
        "How MFU is counted": [_MFU, f"Peaks: {'; '.join(peaks) or 'none'}."],
        "Over the micro-batch": curves,
        "Effects": [*_effects(content)],
        "Throughput against memory": [*_front(content)],
        "Scaling": [*_scaling(content), *drawn("scaling")],
        "Predicted beside measured": [*_forecasts(content["forecasts"])],
        "All runs": [*_all_runs(content["all"])],
    }
    sections += [Section(title, parts, on_terminal=False) for title, parts in more.items() if parts]
    constant = content["constant"]
    return Page(
        f"Analysis of {counted(len(content['all']), 'run')}",
        sections,
        cards={state: str(count) for state, count in content["states"].items()},
        about=f"Alike in all that were measured: {label(constant)}." if constant else "",
        data={"format": 1} | {name: each for name, each in content.items() if name != "rows"},
        generator=generator,
    )


def figure_text(name: str, value: float | None) -> str:
    """A figure in the unit of UNITS."""
    if value is not None and name in ("mfu", "goodput_mfu", "hfu"):
        value *= 100
    return number(value)


def change(value: float | None) -> str:
    """A ratio as a change in percent: 1.093 -> +9.3 %."""
    return "-" if value is None else f"{100 * (value - 1):+.1f} %"


def span(low: float | None, high: float | None) -> str:
    """Two ratios as changes: +3.1 to +4.5 %; a dash where they are not known."""
    return "-" if low is None else f"{change(low).removesuffix(' %')} to {change(high)}"


def _figures(row: Mapping[str, Any], names: Collection[str]) -> list[Cell]:
    return [Cell(figure_text(name, row[name]), value=row[name]) for name in names]


def _best(content: Content) -> Iterator[Part]:
    if not content["best"]:
        yield "No run has both factors and samples/s."
        return
    figures = ["samples_per_second", "audio_seconds_per_second", "seconds_per_step"]
    figures += ["mfu", "goodput_mfu", "hfu", content["memory"]]
    rows: list[_Row] = [
        [label(row, content["names"]), str(row["runs"]), *_figures(row, figures)]
        for row in content["best"]
    ]
    head = ("configuration", "runs", *(UNITS[name] for name in figures))
    yield Table(head, rows, max_rows=30, rest="in summary.json")
    yield Note("Highest mean of samples/s for each size, device, number of GPUs, lengths and data.")


def _verdicts(content: Content) -> Iterator[tuple[str, str]]:
    """(verdict, what it is about); the verdict is pass, fail, cannot tell or note."""
    for figure, each in content["growth"].items():
        text = "no configuration was run at two batches"
        if each["pairs"]:
            limit = f"{100 * each['tolerance']:.1f} %"
            text = f"{len(each['falls'])} of {each['pairs']} steps to the next batch fall by more than the noise ({limit})"
        if each["falls"]:
            worst = min(each["falls"], key=lambda fall: fall["ratio"])
            batches = f"batch {worst['batch']} to {worst['next_batch']}"
            text += (
                f", most by {change(worst['ratio'])}: {label(worst['configuration'])}, {batches}"
            )
        yield each["verdict"], f"{_name(figure)} does not fall with a larger batch: {text}"
    noise = content["noise"].get("samples_per_second", {"df": 0})
    if noise["df"]:
        deviation = f"{100 * noise['variance'] ** 0.5:.2f} % of samples/s"
        yield (
            "note",
            f"standard deviation of repeats: {deviation}, {noise['df']} degrees of freedom",
        )
    elif content["rows"]:
        limit = f"{100 * WITHOUT_REPEATS:g} %"
        yield (
            "cannot tell",
            f"without repeats no effect has an interval and {limit} is taken as noise",
        )
    found = content["forecasts"]
    if found["tried"]:
        verdict = "pass" if found["right"] == found["tried"] else "fail"
        right = f"{found['right']} of {counted(found['tried'], 'run')}"
        yield verdict, f"the forecast whether a run fits into memory was right for {right}"
    if compiled := content["compiled_while_timed"]:
        runs = counted(compiled, "run")
        yield "fail", f"{runs} compiled while being timed; raise [benchmark] warmup_steps"


def _name(figure: str) -> str:
    return UNITS[figure].removesuffix(" %")


def _effects(content: Content) -> Iterator[Part]:
    tables = {figure: rows for figure, rows in content["effects"].items() if rows}
    yield _EFFECTS if tables else "No factor varies besides batch and GPUs."
    for first, others in content["together"].items():
        yield f"{first} always changes together with {', '.join(others)}: the effect is of all of them."
    for figure, effects in tables.items():
        sides = {"equal_batch": "at equal batch", "best_batch": "at best batches"}
        if figure == content["memory"]:
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
    interval = "" if found["low"] is None else span(found["low"], found["high"])
    effect = Cell(change(found["ratio"]), interval, value=found["ratio"])
    return [effect, span(found["smallest"], found["largest"]), str(found["pairs"])]


def _front(content: Content) -> Iterator[Part]:
    rows: list[_Row] = [
        [label(row, content["names"]), *_figures(row, ("samples_per_second", "memory_gib"))]
        for row in content["pareto"]
        if row["on_front"]
    ]
    if rows:
        yield "No other cell of the same size, GPUs and data has both more samples/s and less memory."
        yield Table(("cell", "samples/s", UNITS[content["memory"]]), rows, sortable=True)


def _scaling(content: Content) -> Iterator[Part]:
    rows: list[_Row] = []
    for curve in content["scaling"]:
        first = curve["points"][0]
        for point in curve["points"]:
            name = label(curve["configuration"]) if point is first else ""
            cells = [name, str(point["gpus"]), str(point["nodes"])]
            cells += [number(point["samples_per_second"]), f"{100 * point['efficiency']:.1f} %"]
            rows.append([*cells, *(figure_text("mfu", each["mfu"]) for each in (point, first))])
    if rows:
        head = ("configuration", "GPUs", "nodes", "samples/s", "efficiency", "MFU %", "ideal MFU %")
        yield _SCALING
        yield Table(head, rows, rest="in summary.json")


def _forecasts(forecasts: Mapping[str, Any]) -> Iterator[Part]:
    head = ("median", "min", "max", "runs")
    rows = [
        (_name(figure), *(number(each[name]) for name in head), each["farthest"])
        for figure, each in forecasts["ratios"].items()
    ]
    if rows:
        yield Table(("measured / predicted", *head, "farthest"), rows, left=(0, 5))
    for text, count in forecasts["fits"].items():
        yield f"{text}: {counted(count, 'run')}"


def _all_runs(runs: Sequence[dict[str, Any]]) -> Iterator[Part]:
    """By samples/s, those without any last; the factors that vary, and the figures that any run has."""
    known = (*COLUMNS, *FIGURES)
    factors = [
        name
        for name in runs[0]
        if name not in known
        and not name.startswith("predicted_")
        and len({row[name] for row in runs if row[name] is not None}) > 1
    ]
    figures = [name for name in UNITS if any(row[name] is not None for row in runs)]
    head = ["name", "state", *factors, "repeat", *(UNITS[name] for name in figures)]
    head += ["reason", "source"]
    rows: list[_Row] = []
    for row in sorted(runs, key=lambda row: -(row["samples_per_second"] or 0.0)):
        state = Cell(row["state"], badge=_BADGES.get(row["state"], "note"))
        levels = ("-" if row[name] is None else str(row[name]) for name in (*factors, "repeat"))
        ends = (row["reason"], row["source"])
        rows.append([row["name"], state, *levels, *_figures(row, figures), *ends])
    left = (0, 1, len(head) - 2, len(head) - 1)
    yield Note("A column's head sorts by it. summary.csv has every column.")
    yield Table(head, rows, left=left, sortable=True, rest="in summary.csv")
