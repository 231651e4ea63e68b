"""What the plots of an analysis share: colors, style, labels, panels, axes; and files of a figure."""

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_tts.grids.effects import NO_ALTERNATIVES, Row, grouped
from titan_tts.report.plots import plot_style, svg_element

# Told apart by people who do not see all colors (Okabe and Ito 2008), too; the others are grey.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b4fa3", "#96752f")
GREY = "#b4b9c1"
MARKERS = "osD^vPX*"
_MAX_PANELS = 12

UNITS = {
    "seconds_per_step": "s/step",
    "samples_per_second": "samples/s",
    "audio_seconds_per_second": "seconds of audio per second",
    "mfu": "MFU %",
    "goodput_mfu": "goodput MFU %",
    "hfu": "HFU %",
    "tflops_per_device": "TFLOP/s per device",
    "peak_allocated_gib": "allocated GiB",
    "peak_reserved_gib": "reserved GiB",
    "loss": "loss",
}
"""Figure -> the head of its column, and the label of its axis"""

_PREFIXES = {
    **dict.fromkeys((*NO_ALTERNATIVES, "backend", "layout", "precision", "optimizer"), ""),
    "tensor_parallel": "TP ",
    "global_batch": "global batch ",
}
"""Factor -> what stands before its level; of all others their name"""
_UNSAID = {"backend": "torchtitan", "tensor_parallel": 1, "accumulation": 1}
_NOUNS = {"gpus": ("GPU", "GPUs"), "nodes": ("node", "nodes")}


def value_text(name: str, value: Any) -> str:
    """A factor's level in a few words: compile default, 8 GPUs, fsdp."""
    if value is None:
        return f"{name} not given"
    if name in _NOUNS:
        return f"{value} {_NOUNS[name][value != 1]}"
    return f"{_PREFIXES.get(name, f'{name} ')}{value}"


def label(row: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """A row's levels of `names`, or all, in a line; without those of _UNSAID among others."""
    levels = [(name, row[name]) for name in (row if names is None else names)]
    said = [level for level in levels if level not in _UNSAID.items()]
    words = [value_text(*level) for level in said or levels]
    return ", ".join(word[:48] for word in words) or "all runs"


def draw(title: str, paint: Any, *given: Any) -> dict[str, Any]:
    """`paint` gets an empty figure and `given`."""
    from matplotlib.figure import Figure

    with plot_style(title, **{"legend.fontsize": 8.5}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        paint(figure, *given)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=130)
        return {"title": title, "svg": svg_element(figure), "png": png.getvalue()}


def legend(figure: Any, handles: Sequence[Any], widest: int) -> None:
    """Below the plots, where it covers nothing."""
    columns = 1 if widest > 80 else 2 if widest > 45 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)


def line(text: str, color: str, marker: str = "", style: Any = "-") -> Any:
    """A legend's entry; matplotlib leaves out those that begin with an underscore."""
    from matplotlib.lines import Line2D

    shown = text if not text.startswith("_") else f" {text}"
    return Line2D([], [], color=color, marker=marker, linestyle=style, markersize=5, label=shown)


def panels(figure: Any, count: int, height: float, legend_lines: int) -> list[Any]:
    """Axes of small multiples, at most three in a row, above a legend of `legend_lines`."""
    columns = min(count, 3)
    lines = -(-count // columns)
    each = height if columns > 1 else height + 0.6
    figure.set_size_inches(10, each * lines + 0.2 * legend_lines)
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[count:]:
        axes.set_axis_off()
    return list(grid[:count])


def group_panels(
    figure: Any, rows: Iterable[Row], names: Sequence[str], height: float, legend_lines: int
) -> list[tuple[Any, tuple, list[Row]]]:
    """(axes, levels, rows) of the first groups equal in `names`, each in a panel with its levels as title."""
    shown = list(grouped(rows, names).items())[:_MAX_PANELS]
    found = []
    for axes, (key, group) in zip(panels(figure, len(shown), height, legend_lines), shown):
        columns = axes.get_subplotspec().get_gridspec().ncols
        text = label(dict(zip(names, key, strict=True))) if names else ""
        axes.set_title(textwrap.fill(text, 108 // columns))
        found.append((axes, key, group))
    return found


def line_axes(figure: Any, texts: Sequence[str], height: float) -> Any:
    """Axes with a horizontal line of `height` inches for each text, the first on top."""
    figure.set_size_inches(10, 1.5 + height * len(texts))
    axes = figure.subplots()
    axes.set_yticks(range(len(texts)), texts)
    axes.set_ylim(len(texts) - 0.4, -0.6)
    return axes


def ticks(axes: Any, values: Sequence[int]) -> None:
    """A logarithmic x axis with the values that were measured."""
    axes.set_xscale("log", base=2)
    shown = sorted(set(values))
    shown = shown[:: -(-len(shown) // 8)]
    axes.set_xticks(shown, [f"{value:g}" for value in shown])
    axes.minorticks_off()
