"""The plots of an analysis. Each is drawn once and returned as PNG and SVG."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

from titan_tts.grids.effects import NO_ALTERNATIVES, SPEED, Row, grouped, kept_apart, means, varying
from titan_tts.grids.page import UNITS, label, short_name
from titan_tts.report.plots import INK, plot_style, svg_element

Content = dict[str, Any]

CURVES = ("mfu", SPEED, "peak_reserved_gib")
"""Figures that are drawn over the batch"""

PLOTS = {*(f"{figure}_over_batch" for figure in CURVES), "scaling"}
"""Names of all plots"""

# Told apart by people who do not see all colors (Okabe and Ito 2008), too; the others are grey.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b4fa3", "#96752f")
_GREY = "#b4b9c1"
_MARKERS = "osD^vPX*"
_LOST = {
    "oom": ("x", "out of memory"),
    "failed": ("d", "failed"),
    "timeout": ("1", "timed out"),
    "skipped": ("|", "skipped"),
}
_MAX_PANELS = 12


def draw_all(content: Content) -> dict[str, dict[str, Any]]:
    """Name -> {"title", "svg": an element, "png": bytes} of every plot for which there are figures."""
    rows, names = content["rows"], content["names"]
    plots: dict[str, dict[str, Any]] = {}
    grown = rows and content["growth"]["pairs"]
    for figure in CURVES if grown else ():
        if any(row[figure] is not None for row in rows):
            title = f"{short_name(figure)} over the micro-batch"
            plots[f"{figure}_over_batch"] = _draw(title, _curves, content, figure)
    if content["scaling"]:
        plots["scaling"] = _draw("Scaling over GPUs", _scaling, content["scaling"], names)
    return plots


def _draw(title: str, paint: Any, *given: Any) -> dict[str, Any]:
    """`paint` gets an empty figure and `given`."""
    from matplotlib.figure import Figure

    with plot_style(title, **{"legend.fontsize": 8}):
        figure = Figure(layout="constrained")
        paint(figure, *given)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=130)
        return {"title": title, "svg": svg_element(figure), "png": png.getvalue()}


def _panels(figure: Any, rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[Any, tuple]]:
    """(axes, (levels, rows)) of the first combinations of levels of `names`, one below the other."""
    groups = list(grouped(rows, names).items())
    shown = groups[:_MAX_PANELS]
    figure.set_size_inches(10, 3.2 * len(shown))
    if len(groups) > len(shown):
        figure.suptitle(f"{len(groups) - len(shown)} more groups are in summary.csv", fontsize=9)
    for axes, group in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        axes.set_title(label(dict(zip(names, group[0], strict=True))) if names else "")
        yield axes, group


def _lines(axes: Any, lines: Sequence[tuple[str, list[tuple]]], with_ideal: bool = False) -> None:
    """Lines of points (x, y), the best first: the first ones in color and with names. `with_ideal`: a flat line
    from the first point of each."""
    for number, (text, points) in reversed(list(enumerate(lines))):
        style: dict[str, Any] = {"color": _GREY, "marker": "."}
        if number < len(_COLORS):
            style = {"color": _COLORS[number], "marker": _MARKERS[number], "label": text[:60]}
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, markersize=4.5, **style)
        if with_ideal:
            axes.plot(xs, [ys[0]] * len(xs), color=style["color"], linestyle=":")


def _finish(axes: Any, xlabel: str, ylabel: str, values: Sequence[int]) -> None:
    """A logarithmic x axis with the values that were measured, and the legend next to the plot."""
    axes.set_xscale("log", base=2)
    shown = sorted(set(values))
    shown = shown[:: -(-len(shown) // 8)]
    axes.set_xticks(shown, [f"{value:g}" for value in shown])
    axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_ylim(0, None)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), reverse=True)


def _curves(figure: Any, content: Content, name: str) -> None:
    """A panel per NO_ALTERNATIVES, a line per configuration, and marks at zero of runs without results."""
    names, scale = content["names"], 100 if name == "mfu" else 1
    apart = kept_apart(names)
    inner = [each for each in names if each not in (*NO_ALTERNATIVES, "batch")]
    constant = {each: v for each, v in content["constant"].items() if each in NO_ALTERNATIVES}
    lost = [  # a run without results has no device; other sizes ... have no panel
        row
        for row in content["all"]
        if row["state"] in _LOST
        and row["batch"]
        and all(row[each] in (None, value) for each, value in constant.items())
    ]
    rows = [row for row in content["rows"] if row[name] is not None]
    table = means(rows, list(dict.fromkeys([*names, "batch"])), (name, SPEED))
    for axes, (levels, here) in _panels(figure, table, apart):
        lines = sorted(grouped(here, inner).values(), key=lambda of: -max(r[SPEED] for r in of))
        points = [sorted((row["batch"], scale * row[name]) for row in of) for of in lines]
        _lines(axes, [(label(of[0], inner), p) for of, p in zip(lines, points, strict=True)])
        batches = [row["batch"] for row in here]
        for state, (marker, text) in _LOST.items():
            in_panel = grouped([row for row in lost if row["state"] == state], apart).get(
                levels, ()
            )
            if at := [row["batch"] for row in in_panel]:
                style = {"marker": marker, "color": INK, "linestyle": "", "label": text}
                axes.plot(at, [0] * len(at), clip_on=False, **style)
                batches += at
        _finish(axes, "micro-batch (samples per GPU)", UNITS[name], batches)


def _scaling(figure: Any, curves: Sequence[Row], names: Sequence[str]) -> None:
    """MFU, or else efficiency, over GPUs: a panel per NO_ALTERNATIVES, with each curve's flat ideal."""
    apart = [name for name in kept_apart(names) if name not in ("gpus", "nodes")]
    with_mfu = all(point["mfu"] is not None for curve in curves for point in curve["points"])
    shown, axis = ("mfu", UNITS["mfu"]) if with_mfu else ("efficiency", "efficiency (% per GPU)")
    rows = [row["configuration"] | {"points": row["points"]} for row in curves]
    for axes, (_, here) in _panels(figure, rows, apart):
        levels = varying(here, [name for name in here[0] if name != "points"])
        points = [[(each["gpus"], 100 * each[shown]) for each in row["points"]] for row in here]
        lines = [(label(row, levels), each) for row, each in zip(here, points, strict=True)]
        _lines(axes, lines, with_ideal=True)
        gpus = [gpus for line in points for gpus, _ in line]
        _finish(axes, "GPUs (dotted: ideal, as on the fewest)", axis, gpus)
