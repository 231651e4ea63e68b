"""The doctor's HTML page: one file with its styles and plots inside, opened by any browser."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_tts.doctor.checks import characters_per_second
from titan_tts.doctor.findings import Limits
from titan_tts.doctor.text_report import (
    size_text,
    suggestion_lines,
    summary_lines,
)
from titan_tts.html import page_template, plot_style, svg_element
from titan_tts.tables import number
from torchtitan.models.dit_tts.data.dataset import Dataset

GENERATOR = "titan-tts data doctor"
_BLUE, _ORANGE = "#3465a4", "#d9730d"


def render(result: dict[str, Any], plots: dict[str, str]) -> str:
    """The page of `examine`'s result, with plots by title."""
    filters = {"size": size_text, "number": number}
    template = page_template(__package__, "doctor.html.jinja", filters)
    return template.render(
        generator=GENERATOR,
        summary_lines=summary_lines(result["summary"]),
        suggestion_lines=suggestion_lines(result["suggestion"]),
        plots=plots,
        **result,
    )


def draw_plots(dataset: Dataset, limits: Limits, edges: list[int]) -> dict[str, str]:
    """Title -> SVG of every plot; `edges` (frames) end the suggested buckets."""
    if not len(dataset):
        return {}
    fps = limits.frames_per_second
    rate = characters_per_second(dataset, fps)
    # Far ends are gathered in the outermost bins.
    rate = np.clip(rate, *np.quantile(rate, [0.001, 0.999]))
    characters, text_bytes = dataset.text_chars, dataset.text_bytes
    plots = {
        "Length of latents": _histogram(
            dataset.frames / fps,
            "seconds",
            [edge / fps for edge in edges],
            "ends of the suggested buckets",
        ),
        "Length of texts": _histogram(characters, "characters"),
        "Speech rate": _histogram(rate, "characters per second", [np.median(rate)], "median"),
    }
    if (characters != text_bytes).any():
        plots["Length of texts in bytes"] = _histogram(text_bytes, "bytes")
    return plots


def _histogram(
    values: np.ndarray, unit: str, marks: Sequence[float] = (), meaning: str = ""
) -> str:
    """An `<svg>` element: samples by value, with lines at `marks`, which the legend explains above the plot."""
    from matplotlib.figure import Figure

    with plot_style(unit):
        # Two plots stand in a row of the page: at this width letters are as large as the page's.
        figure = Figure(figsize=(5.0, 2.6), layout="constrained")
        axes = figure.add_subplot()
        axes.hist(values, bins=60, color=_BLUE)
        for number, mark in enumerate(marks):
            axes.axvline(mark, color=_ORANGE, linewidth=1, label="" if number else meaning)
        if marks:
            axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
        axes.set(xlabel=unit, ylabel="samples")
        return svg_element(figure)
