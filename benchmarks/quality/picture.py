"""The picture of the report: word error rate over training seconds, one line per recipe."""

from collections.abc import Mapping
from typing import Any

from benchmarks.quality.figures import TARGETS
from titan_tts.grids.drawing import COLORS, GREY, MARKERS, draw, legend, line

_LEAST = 0.5
"""percent; lower rates are drawn there, since the axis is logarithmic"""


def picture(report: Mapping[str, Any]) -> dict[str, Any]:
    """{"svg", "png"} of the mean of each budget, with every run as a small point."""
    return draw("WER over training seconds", _paint, report)


def _paint(figure: Any, report: Mapping[str, Any]) -> None:
    recipes, entries = report["recipes"], []
    figure.set_size_inches(10, 4.4 + 0.2 * -(-len(recipes) // 3))
    axes = figure.subplots()
    for number, (name, recipe) in enumerate(recipes.items()):
        color = COLORS[number] if number < len(COLORS) else GREY
        marker = MARKERS[number % len(MARKERS)]
        budgets = recipe["budgets"]
        seconds = [budget["seconds"]["mean"] for budget in budgets]
        mean, low, high = (
            [_shown(budget["wer"][kind]) for budget in budgets] for kind in ("mean", "min", "max")
        )
        axes.fill_between(seconds, low, high, color=color, alpha=0.12, linewidth=0)
        width = 2.4 if name == "shipped" else 1.4
        axes.plot(seconds, mean, color=color, marker=marker, markersize=5, linewidth=width)
        entries.append(line(name, color, marker))
    for target in TARGETS:
        axes.axhline(100 * target, color="#444", linewidth=0.8, linestyle=":")
    _log_axis(axes.xaxis)
    _log_axis(axes.yaxis)
    axes.set(xlabel="training seconds, one thread", ylabel="WER (%), range over training seeds")
    axes.set_ylim(_LEAST * 0.9, 130)
    legend(figure, entries, 20)


def _shown(rate: float) -> float:
    return max(_LEAST, 100 * rate)


def _log_axis(axis: Any) -> None:
    """A logarithmic axis with plain numbers: 1, 2, 5, 10 ..."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())
