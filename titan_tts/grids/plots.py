"""The plots of an analysis. Each is drawn once and returned as PNG and SVG."""

from collections.abc import Mapping, Sequence
from typing import Any

from titan_tts.grids import drawing
from titan_tts.grids.drawing import COLORS, GREY, MARKERS, UNITS, label, legend, line
from titan_tts.grids.effects import NO_ALTERNATIVES, Row, grouped, key_of
from titan_tts.grids.verdicts import kept_apart, means
from titan_tts.report.plots import INK, LINE

Content = dict[str, Any]

CURVES = ("mfu", "samples_per_second", "peak_reserved_gib")
"""Figures that are drawn over the batch"""

PLOTS = {
    *(f"{figure}_over_batch" for figure in CURVES),
    *("configurations", "scaling"),
}
"""Names of all plots"""

_LOST = {
    "oom": ("x", "out of memory"),
    "failed": ("d", "failed"),
    "timeout": ("1", "timed out"),
    "skipped": ("|", "skipped"),
}
_MAX_BARS = 40


def draw_all(content: Content) -> dict[str, dict[str, Any]]:
    """Name -> {"title", "svg": an element, "png": bytes} of every plot for which there are figures."""
    rows, names = content["rows"], content["names"]
    plots: dict[str, tuple[str, Any, tuple]] = {}
    if rows:
        best = "mfu" if any(row["mfu"] is not None for row in rows) else "samples_per_second"
        title = f"{_name(best)} of each configuration at its best micro-batch"
        plots["configurations"] = title, _bars, (rows, names, best)
    grown = rows and content["growth"]["samples_per_second"]["pairs"]
    for figure in CURVES if grown else ():
        if any(row[figure] is not None for row in rows):
            title = f"{_name(figure)} over the micro-batch"
            plots[f"{figure}_over_batch"] = title, _curves, (content, figure)
    if content["scaling"]:
        plots["scaling"] = "Scaling over GPUs", _scaling, (content["scaling"], names)
    return {
        name: drawing.draw(title, paint, *given) for name, (title, paint, given) in plots.items()
    }


def _name(figure: str) -> str:
    return UNITS[figure].removesuffix(" %")


def _curves(figure: Any, content: Content, name: str) -> None:
    """One panel per NO_ALTERNATIVES, one line per configuration: the fastest in color, the rest grey.
    What has no figures is marked below zero at its batch, each configuration in a line of its own."""
    names, apart = content["names"], kept_apart(content["names"])
    inner = [each for each in names if each not in (*NO_ALTERNATIVES, "batch")]
    scale = 100 if name == "mfu" else 1
    measured = [row for row in content["rows"] if row[name] is not None]
    table = means(measured, [*dict.fromkeys([*names, "batch"])], (name, "samples_per_second"))
    ranked = _ranked(content["rows"], apart, inner)
    color = dict(zip(ranked, COLORS, strict=False))
    marker = dict(zip(ranked, MARKERS, strict=False))
    lost = _lost_cells(content, inner)
    entries = [
        line(label(dict(zip(inner, key, strict=True))), each, marker[key])
        for key, each in color.items()
    ]
    if len(ranked) > len(color):
        entries.append(line(f"{len(ranked) - len(color)} slower configurations", GREY))
    entries += [
        line(text, INK, mark, "")
        for state, (mark, text) in _LOST.items()
        if any(row["state"] == state for _, row in lost)
    ]
    shown = drawing.group_panels(figure, table, apart, 3.0, len(entries))
    for axes, group, here in shown:
        top = scale * max(row[name] for row in here) or 1
        lines: dict[tuple, list] = {}
        for row in sorted(here, key=lambda row: row["batch"]):
            lines.setdefault(key_of(row, inner), []).append((row["batch"], scale * row[name]))
        for key in sorted(lines, key=lambda key: key in color):  # color over grey
            style = {"marker": marker[key], "markersize": 4.5} if key in color else {"marker": "."}
            axes.plot(*zip(*lines[key], strict=True), color=color.get(key, GREY), **style)
        marked = [(key, row) for key, row in lost if key_of(row, apart) == group]
        _mark_lost(axes, marked, color, top)
        drawing.ticks(axes, [row["batch"] for row in (*here, *(row for _, row in marked))])
        axes.set(xlabel="micro-batch (samples per GPU)", ylabel=UNITS[name])
    if more := len({key_of(row, apart) for row in table}) - len(shown):
        figure.suptitle(f"{more} more groups are in summary.csv", fontsize=9)
    legend(figure, entries, max(len(each.get_label()) for each in entries))


def _ranked(rows: Sequence[Row], apart: Sequence[str], inner: Sequence[str]) -> list[tuple]:
    """Configurations by their best throughput relative to the best of the same NO_ALTERNATIVES."""
    groups = grouped(rows, apart).items()
    best = {key: max(row["samples_per_second"] for row in group) for key, group in groups}
    relative: dict[tuple, float] = {}
    for row in rows:
        key, value = key_of(row, inner), row["samples_per_second"] / best[key_of(row, apart)]
        relative[key] = max(relative.get(key, 0.0), value)
    return sorted(relative, key=lambda key: -relative[key])


def _lost_cells(content: Content, inner: Sequence[str]) -> list[tuple[Any, Row]]:
    """Rows without results, each with its configuration; None: of a level that no measured run has. Such
    sizes, devices ... have no panel."""
    found: list[tuple[Any, Row]] = []
    for row in content["lost"]:
        constant = content["constant"].items()
        others = {name for name, value in constant if row[name] not in (None, value)}
        if row["batch"] and not others & {*NO_ALTERNATIVES}:
            found.append((None if others else key_of(row, inner), row))
    return found


def _mark_lost(
    axes: Any, lost: Sequence[tuple[Any, Row]], color: Mapping[Any, str], top: float
) -> None:
    """Marks below zero, and an axis that leaves them room and counts from zero."""
    keys = [key for key, _ in lost]
    order = [key for key in color if key in keys]
    lines = len(order) + any(key not in color for key in keys)
    step = top * 0.055
    for key, row in lost:
        y = -step * (order.index(key) + 1 if key in order else len(order) + 1)
        style = {"marker": _LOST[row["state"]][0], "color": color.get(key, GREY)}
        axes.plot(row["batch"], y, **style, markersize=5, clip_on=False)
    axes.set_ylim(-step * (lines + 0.6) if lines else 0, top * 1.06)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top * 1.06])
    if lines:
        axes.axhline(0, color=LINE, linewidth=0.8)


def _scaling(figure: Any, curves: Sequence[Row], names: Sequence[str]) -> None:
    """MFU, or else efficiency, over GPUs: a panel per NO_ALTERNATIVES, with the flat ideal line of each curve."""
    apart = [name for name in kept_apart(names) if name not in ("gpus", "nodes")]
    with_mfu = all(point["mfu"] is not None for curve in curves for point in curve["points"])
    shown, axis = ("mfu", UNITS["mfu"]) if with_mfu else ("efficiency", "efficiency (% per GPU)")
    rows = [row["configuration"] | {"points": row["points"]} for row in curves]
    entries = [line("ideal: as on the fewest GPUs", INK, style=":")]
    for axes, _, here in drawing.group_panels(figure, rows, apart, 4.2, 1):
        levels = [name for name in here[0] if name != "points"]
        varying = [name for name in levels if len({curve[name] for curve in here}) > 1]
        points = [point for curve in here for point in curve["points"]]
        for number, curve in reversed(list(enumerate(here))):
            gpus = [point["gpus"] for point in curve["points"]]
            values = [100 * point[shown] for point in curve["points"]]
            style: Any = {"color": GREY, "marker": "."}
            if number < len(COLORS):
                text = label(curve, varying)
                style = {"color": COLORS[number], "marker": MARKERS[number], "label": text}
            axes.plot(gpus, values, markersize=4.5, **style)
            axes.plot(gpus, [values[0]] * len(gpus), color=style["color"], linestyle=":")
        drawing.ticks(axes, [point["gpus"] for point in points])
        axes.set(xlabel="GPUs", ylabel=axis)
        axes.set_ylim(0, None)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), reverse=True)
    legend(figure, entries, 10)


def _best_of_each(rows: Sequence[Row], names: Sequence[str], figures: Sequence[str]) -> list[Row]:
    """The cell of each configuration at its best batch; of equal NO_ALTERNATIVES the fastest first."""
    best: dict[tuple, dict[str, Any]] = {}
    table = means(rows, names, (*figures, "samples_per_second"))
    for row in sorted(table, key=lambda row: -row["samples_per_second"]):
        best.setdefault(key_of(row, [name for name in names if name != "batch"]), row)
    groups = grouped(best.values(), kept_apart(names)).values()
    return [row for group in groups for row in group[: max(1, _MAX_BARS // len(groups))]]


def _bars(figure: Any, rows: Sequence[Row], names: Sequence[str], shown: str) -> None:
    """One bar per configuration, in the color of its size."""
    table = _best_of_each([row for row in rows if row[shown] is not None], names, [shown])
    sizes = list(dict.fromkeys(row.get("size") for row in table))
    axes = drawing.line_axes(figure, [label(row, names)[:90] for row in table], 0.3)
    axes.grid(axis="y", visible=False)
    scale = 100 if shown == "mfu" else 1
    for y, row in enumerate(table):
        value, color = scale * row[shown], COLORS[sizes.index(row.get("size")) % len(COLORS)]
        axes.barh(y, value, height=0.65, color=color)
        axes.text(value, y, f" {value:.3g}", va="center", fontsize=8)
    axes.set_xlabel(UNITS[shown])
