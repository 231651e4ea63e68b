"""The doctor's HTML page: one file with its styles and plots inside, opened by any browser."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.doctor.checks import characters_per_second
from titan_tts.doctor.findings import Limits
from titan_tts.doctor.scan import ChannelMoments, Measurements
from titan_tts.doctor.summary import QUANTILES
from titan_tts.doctor.text_report import (
    LENGTHS,
    short_number,
    size_text,
    thousands,
)
from titan_tts.html import PLOT_STYLE, page_template
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.errors import InputError, require_modules
from torchtitan.models.dit_tts.files import check_writable

GENERATOR = "titan-tts data doctor"
# Browsers are slow with a table of more rows.
MAX_SHARDS = 500
_BLUE, _ORANGE = "#3465a4", "#d9730d"


def check_output(path: str) -> Path:
    """The page's path, once it is known that it can be written and replaces nothing else.

    Raises:
        InputError: matplotlib is not installed, no file can be written there, or another's file exists.
    """
    require_modules("matplotlib")
    check_writable(path, "--output")
    output = Path(path).expanduser().absolute()
    if output.exists() and GENERATOR.encode() not in output.read_bytes()[:1024]:
        raise InputError(
            f"--output = {path}, but that file is no page of the doctor, so it is not overwritten; "
            "give another name"
        )
    return output


def render(result: dict[str, Any], plots: dict[str, str]) -> str:
    """The page.

    Args:
        result: as `examine` makes it.
        plots: title -> SVG.
    """
    filters = {"thousands": thousands, "size": size_text, "short": short_number}
    template = page_template(__package__, "doctor.html.jinja", filters)
    return template.render(
        generator=GENERATOR,
        lengths=LENGTHS,
        quantiles=QUANTILES,
        shown_shards=sorted(result["shards"], key=lambda one: -one["problems"])[:MAX_SHARDS],
        plots=plots,
        **result,
    )


def draw_plots(
    dataset: Dataset, found: Measurements, limits: Limits, edges: list[int]
) -> dict[str, str]:
    """Title -> SVG of every plot; none of an empty dataset.

    Args:
        edges: of the suggested buckets, in frames.
    """
    if not len(dataset):
        return {}
    fps = limits.frames_per_second
    rate = characters_per_second(dataset, fps)
    # Far ends are gathered in the outermost bins.
    rate = np.clip(rate, *np.quantile(rate, [0.001, 0.999]))
    characters, text_bytes = dataset.text_chars, dataset.text_bytes
    plots = {
        "Length of latents": partial(
            _histogram,
            dataset.frames / fps,
            "seconds",
            [edge / fps for edge in edges],
            "ends of the suggested buckets",
        ),
        "Length of texts": partial(_histogram, characters, "characters"),
        "Speech rate": partial(
            _histogram, rate, "characters per second", [np.median(rate)], "median"
        ),
    }
    if (characters != text_bytes).any():
        plots["Length of texts in bytes"] = partial(_histogram, text_bytes, "bytes")
    if found.channels.frames:
        plots["Latent channels"] = partial(_channel_moments, found.channels)
    return {title: _draw(title, paint) for title, paint in plots.items()}


def _draw(title: str, paint: Callable[..., None]) -> str:
    """An `<svg>` element without the title, which the page has; `paint` gets the axes to draw on."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # A salt of its own keeps the ids of one plot apart from another's on the same page.
    with matplotlib.rc_context(PLOT_STYLE | {"svg.hashsalt": title}):
        # Of the width at which two stand in a row of the page, so that letters are as large as its own.
        figure = Figure(figsize=(5.0, 2.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        paint(axes=axes)
        buffer = io.StringIO()
        with warnings.catch_warnings():
            # Widths of glyphs that matplotlib's own font lacks are guessed, which is near enough.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)


def _histogram(
    values: np.ndarray, unit: str, marks: Sequence[float] = (), meaning: str = "", *, axes: Any
) -> None:
    """Samples by value, with lines at `marks`, which the legend explains."""
    axes.hist(values, bins=60, color=_BLUE)
    for number, mark in enumerate(marks):
        axes.axvline(mark, color=_ORANGE, linewidth=1, label="" if number else meaning)
    if marks:
        _legend(axes)
    axes.set(xlabel=unit, ylabel="samples")


def _legend(axes: Any) -> None:
    """Above the plot, where it covers nothing."""
    axes.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)


def _channel_moments(channels: ChannelMoments, *, axes: Any) -> None:
    """Mean and standard deviation of every channel."""
    number, mean, std = np.arange(len(channels.mean)), channels.mean, channels.std
    axes.fill_between(number, mean - std, mean + std, step="mid", color=_BLUE, alpha=0.2)
    axes.step(number, mean, where="mid", color=_BLUE, linewidth=1, label="mean ± std")
    axes.step(number, std, where="mid", color=_ORANGE, linewidth=1, label="standard deviation")
    axes.margins(x=0.01)
    _legend(axes)
    axes.set(xlabel="channel", ylabel="value")
