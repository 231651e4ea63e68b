"""The page of an analysis: best configurations, verdicts, effects, scaling and every run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from titan_tts.grids.drawing import UNITS, label
from titan_tts.grids.effects import Noise
from titan_tts.grids.runs import COLUMNS, FIGURES
from titan_tts.grids.verdicts import WITHOUT_REPEATS
from titan_tts.report.page import Cell, Figure, Kind, Note, Page, Part, Section, Table
from titan_tts.report.words import counted, number

MAX_LISTED = 30
"""Rows of a table that may be long; summary.json has all."""

_BADGES: dict[str, Kind] = {
    **dict.fromkeys(("pass", "completed"), "good"),
    **dict.fromkeys(("fail", "oom", "failed", "unreadable", "timeout"), "error"),
}

_MFU = (
    "MFU: training FLOPs of the padded shapes, attention over all keys, without what activation checkpointing repeats, over the "
    "device's dense bf16 peak. Goodput MFU counts real lengths only, HFU what is repeated, too. Each benchmark.json has other "
    "conventions beside them."
)


def analysis_page(
    generator: str, content: dict[str, Any], plots: Mapping[str, dict[str, Any]]
) -> Page:
    """The page of `analyse`'s content and `draw_all`'s plots. Another analysis recognizes it by `generator`."""

    def drawn(*names: str) -> list[Part]:
        return [Figure(plots[name]["title"], plots[name]["svg"]) for name in names if name in plots]

    growth = content["growth"]
    best = [*_best(content), *drawn("configurations")]
    sections = [Section("Best configuration", best)]
    if lines := verdicts(content):
        rows = [
            (Cell(verdict, badge=_BADGES.get(verdict, "note")), text) for verdict, text in lines
        ]
        falls = (_falls(figure, each) for figure, each in growth.items() if each["falls"])
        sections.append(Section("Verdicts", [Table((), rows, left=(0, 1)), *falls]))
    more: dict[str, list[Part]] = {"How MFU is counted": [_MFU, *_peaks(content["peaks"])]}
    if content["rows"]:
        batches = "No configuration was run at two batches."
        if growth["samples_per_second"]["pairs"]:
            batches = (
                "One line per configuration; the fastest have a color, the rest is grey. Marks below zero are runs that failed "
                "or were skipped at that batch, in the configuration's color."
            )
        curves = drawn(*(name for name in plots if name.endswith("_over_batch")))
        more |= {
            "Over the micro-batch": [batches, *curves],
            "Effects": [*_effects(content)],
            "Throughput against memory": [*_front(content)],
            "Scaling": [*_scaling(content), *drawn("scaling")],
            "Predicted beside measured": [*_forecasts(content["forecasts"])],
        }
    more["All runs"] = [*_all_runs(content["all"])]
    sections += [Section(title, parts, on_terminal=False) for title, parts in more.items()]
    constant = content["constant"]
    return Page(
        f"Analysis of {counted(len(content['all']), 'run')}",
        sections,
        cards={state: str(count) for state, count in content["states"].items()},
        about=f"Alike in all that were measured: {label(constant)}." if constant else "",
        data={"format": 1}
        | {name: value for name, value in content.items() if name not in ("rows", "lost")},
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


def _long(head: Sequence[str], rows: Sequence[Sequence[str | Cell]], **more: Any) -> Table:
    return Table(head, rows, max_rows=MAX_LISTED, rest="in summary.json", **more)


def _best(content: dict[str, Any]) -> Iterator[Part]:
    if not content["best"]:
        yield "No run has both factors and samples/s, so nothing can be compared."
        return
    figures = ["samples_per_second", "audio_seconds_per_second", "seconds_per_step"]
    figures += ["mfu", "goodput_mfu", "hfu", content["memory"]]
    rows = [
        (label(row, content["names"]), str(row["runs"]), *(figure_text(f, row[f]) for f in figures))
        for row in content["best"]
    ]
    yield _long(("configuration", "runs", *(UNITS[name] for name in figures)), rows)
    several = ", for each size, device, number of GPUs, kind of lengths and data"
    yield Note(f"Highest mean of samples/s{several if len(rows) > 1 else ''}.")


def verdicts(content: dict[str, Any]) -> list[tuple[str, str]]:
    """(verdict, what it is about); the verdict is pass, fail, cannot tell or note."""
    lines = []
    for figure, each in content["growth"].items():
        text = "no configuration was run at two batches"
        if each["pairs"]:
            known = "" if content["noise"][figure]["df"] else ", taken without repeats"
            text = (
                f"{len(each['falls'])} of {each['pairs']} steps to the next batch fall by more than the noise "
                f"({100 * each['tolerance']:.1f} %{known})"
            )
        name = UNITS[figure].removesuffix(" %")
        lines.append((each["verdict"], f"{name} does not fall with a larger batch: {text}"))
    speed = Noise(**content["noise"]["samples_per_second"]) if content["rows"] else None
    if speed and speed.df:
        deviation = f"{100 * speed.variance**0.5:.2f} % of samples/s (standard deviation, "
        text = f"repeats differ by {deviation}{speed.df} degrees of freedom)"
        lines.append(("note", text))
    elif speed:
        noise = f"{100 * WITHOUT_REPEATS:g} % is taken as noise"
        text = f"no cell was run twice, so no effect has an interval and {noise}"
        lines.append(("cannot tell", text))
    forecasts = content["forecasts"]
    if forecasts["tried"]:
        right = f"{forecasts['right']} of {counted(forecasts['tried'], 'run')}"
        verdict = "pass" if forecasts["right"] == forecasts["tried"] else "fail"
        text = f"the forecast whether a run fits into memory was right for {right}"
        lines.append((verdict, text))
    if compiled := content["compiled_while_timed"]:
        runs = counted(compiled, "run")
        text = f"{runs} compiled while being timed; raise [benchmark] warmup_steps"
        lines.append(("fail", text))
    return lines


def _falls(figure: str, growth: dict[str, Any]) -> Table:
    rows = [
        (
            label(row["configuration"]),
            str(row["batch"]),
            str(row["next_batch"]),
            change(row["ratio"]),
        )
        for row in growth["falls"]
    ]
    return _long(
        (f"configuration whose {UNITS[figure]} falls", "from batch", "to batch", "change"), rows
    )


def _peaks(peaks: Mapping[str, int]) -> Iterator[Part]:
    if peaks:
        found = "; ".join(f"{text} ({counted(count, 'run')})" for text, count in peaks.items())
        yield f"Peaks: {found}. Without a known peak there is no MFU."


def _effects(content: dict[str, Any]) -> Iterator[Part]:
    degrees = content["noise"]["samples_per_second"]["df"]
    intervals = "No cell was repeated, so there are no intervals."
    if degrees:
        intervals = (
            f"Small figures are intervals of 95 %: Student's t with the pooled variance of repeats, {degrees} degrees of freedom, about the mean "
            "over just these pairs."
        )
    yield (
        "Change by one level against another, for each model size. At equal batch: mean over pairs of cells equal in every other "
        "factor, the micro-batch too. At best batches: both sides where they are fastest. Range: the smallest and "
        f"largest effect over the pairs. {intervals}"
    )
    for first, others in content["together"].items():
        yield (
            f"{first} always changes together with {', '.join(others)}: what is listed for {first} is the effect of all of them."
        )
    tables = {figure: rows for figure, rows in content["effects"].items() if rows}
    if not tables:
        yield "No factor varies besides batch and GPUs."
    for figure, effects in tables.items():
        sides = {"equal_batch": "at equal batch", "best_batch": "at best batches"}
        if figure == content["memory"]:
            del sides["best_batch"]
        head = ["size", "factor", "level", "against"]
        for side in sides.values():
            head += [side, "range", "pairs"]
        rows: list[list[str | Cell]] = []
        for row in effects:
            if row["equal_batch"]["pairs"] or row["best_batch"]["pairs"]:
                factors = ", ".join([row["factor"], *row["together"]])
                cells: list[str | Cell] = [
                    str(row["size"]),
                    factors,
                    str(row["level"]),
                    str(row["base"]),
                ]
                for side in sides:
                    cells += _estimate(row[side])
                rows.append(cells)
        yield Table(head, rows, title=UNITS[figure], left=range(4), sortable=True)


def _estimate(found: dict[str, Any]) -> list[str | Cell]:
    interval = "" if found["low"] is None else span(found["low"], found["high"])
    reach = span(found["smallest"], found["largest"])
    return [
        Cell(change(found["ratio"]), interval, value=found["ratio"]),
        reach,
        str(found["pairs"]),
    ]


def _front(content: dict[str, Any]) -> Iterator[Part]:
    yield (
        "On the front no other cell of the same size, GPUs and data has both more samples/s and less memory."
    )
    rows: list[Sequence[str | Cell]] = [
        (label(row, content["names"]), *_numbers(row, ("samples_per_second", "memory_gib")))
        for row in content["pareto"]
        if row["on_front"]
    ]
    yield Table(("cell on the front", "samples/s", UNITS[content["memory"]]), rows, sortable=True)


def _numbers(row: Mapping[str, Any], names: Collection[str]) -> list[Cell]:
    return [Cell(figure_text(name, row[name]), value=row[name]) for name in names]


def _scaling(content: dict[str, Any]) -> Iterator[Part]:
    if not content["scaling"]:
        yield "No configuration was run on different numbers of GPUs."
        return
    yield (
        "At equal micro-batch and configuration. Efficiency is throughput per GPU over that at the smallest number of GPUs; a run "
        "on one data-parallel rank begins the curve of every layout. The ideal MFU is that at the smallest number of GPUs."
    )
    has_mfu = any(row["mfu"] for row in content["rows"])
    rows = []
    for curve in content["scaling"][:MAX_LISTED]:
        for place, point in enumerate(curve["points"]):
            cells = ["" if place else label(curve["configuration"])]
            cells += [str(point["gpus"]), str(point["nodes"]), number(point["samples_per_second"])]
            cells.append(f"{100 * point['efficiency']:.1f} %")
            if has_mfu:
                cells += [figure_text("mfu", each["mfu"]) for each in (point, curve["points"][0])]
            rows.append(cells)
    head = ["configuration", "GPUs", "nodes", "samples/s", "efficiency"]
    yield Table([*head, *(["MFU %", "ideal MFU %"] if has_mfu else [])], rows)
    if (more := len(content["scaling"]) - MAX_LISTED) > 0:
        yield f"{more:,} more in summary.json."


def _forecasts(forecasts: dict[str, Any]) -> Iterator[Part]:
    if not (forecasts["tried"] or forecasts["ratios"]):
        yield "No run has a forecast."
    rows = [
        (
            UNITS[figure].removesuffix(" %"),
            *(number(each[name]) for name in ("median", "min", "max", "runs")),
            each["farthest"],
        )
        for figure, each in forecasts["ratios"].items()
    ]
    yield Table(
        ("measured / predicted", "median", "min", "max", "runs", "farthest"), rows, left=(0, 5)
    )
    for text, count in forecasts["fits"].items():
        yield f"{text}: {counted(count, 'run')}"


def run_columns(runs: Sequence[dict]) -> tuple[list[str], list[str]]:
    """Factors that vary between the runs, and the figures that any has."""
    factors = [
        name
        for name in runs[0]
        if name not in (*COLUMNS, *FIGURES)
        and not name.startswith("predicted_")
        and len({row[name] for row in runs if row[name] is not None}) > 1
    ]
    return factors, [name for name in UNITS if any(row[name] is not None for row in runs)]


def _all_runs(runs: Sequence[dict[str, Any]]) -> Iterator[Part]:
    """By samples/s, those without any last."""
    factors, figures = run_columns(runs)
    head = ["name", "state", *(name.replace("_", " ") for name in factors), "repeat"]
    head += [*(UNITS[name] for name in figures), "reason", "source"]
    rows: list[list[str | Cell]] = []
    for row in sorted(runs, key=lambda row: -(row["samples_per_second"] or 0.0)):
        state = Cell(row["state"], badge=_BADGES.get(row["state"], "note"))
        levels = ("-" if row[name] is None else str(row[name]) for name in (*factors, "repeat"))
        ends = (row["reason"], row["source"])
        rows.append([row["name"], state, *levels, *_numbers(row, figures), *ends])
    left = (0, 1, len(head) - 2, len(head) - 1)
    yield Note("A column's head sorts by it. summary.csv has every column.")
    yield Table(head, rows, left=left, sortable=True, rest="in summary.csv")
