"""Plots of a dataset as SVG text, to stand inside an HTML page without any other file."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.errors import InputError

MOST_SPEAKERS = 30
_BLUE, _ORANGE, _GREY = "#3465a4", "#d9730d", "#8a8f98"
_STYLE = {
    # Text stays text: small, searchable, and any script is drawn in the reader's fonts.
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b5b9c0",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "text.parse_math": False,  # a speaker may be called "$1"
}
_LONGEST_LABEL = 24


def need_matplotlib() -> None:
    """Raises InputError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            "the page needs matplotlib, which is not installed; run: "
            'pip install "titan-tts[speech]".'
        ) from None


def draw(paint: Callable[[Any], None], *, size: tuple[float, float] = (6.4, 3.0)) -> str:
    """An ``<svg>`` element; ``paint`` is given the axes to draw on.

    Args:
        size: width and height in inches of 72 points.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # A salt of its own keeps the ids of one picture apart from another's on the same page.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": paint.__name__}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.add_subplot())
        buffer = io.StringIO()
        with warnings.catch_warnings():
            # Widths of glyphs that matplotlib's own font lacks are guessed, which is near enough.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def frames_picture(
    frames: np.ndarray, frames_per_second: float, edges: Sequence[int]
) -> Callable[[Any], None]:
    """Histogram of lengths in seconds with the suggested buckets' edges."""

    def frames_histogram(axes: Any) -> None:
        axes.hist(frames / frames_per_second, bins=60, color=_BLUE)
        for number, edge in enumerate(edges):
            label = "bucket edges" if number == 0 else None
            axes.axvline(edge / frames_per_second, color=_ORANGE, linewidth=1, label=label)
        axes.set(title="Length of latents", xlabel="seconds", ylabel="samples")
        if len(edges):
            axes.legend()

    return frames_histogram


def text_picture(text_chars: np.ndarray, text_bytes: np.ndarray) -> Callable[[Any], None]:
    """Histogram of text lengths, in characters and in bytes where these differ."""

    def text_histogram(axes: Any) -> None:
        bins = np.linspace(0, max(int(text_bytes.max(initial=1)), 1), 61)
        axes.hist(text_chars, bins=bins, color=_BLUE, label="characters")
        if (text_chars != text_bytes).any():
            axes.hist(text_bytes, bins=bins, color=_ORANGE, histtype="step", label="bytes")
            axes.legend()
        axes.set(title="Length of texts", xlabel="characters", ylabel="samples")

    return text_histogram


def speech_rate_picture(rate: np.ndarray) -> Callable[[Any], None]:
    """Histogram of characters a second, its far ends gathered in the outermost bins."""

    def rate_histogram(axes: Any) -> None:
        low, high = np.quantile(rate, [0.001, 0.999]) if len(rate) else (0.0, 1.0)
        margin = 0.25 * max(high - low, 0.1 * abs(high), 1e-3)
        low, high = max(0.0, low - margin), high + margin
        axes.hist(np.clip(rate, low, high), bins=np.linspace(low, high, 61), color=_BLUE)
        if len(rate):
            axes.axvline(np.median(rate), color=_ORANGE, linewidth=1, label="median")
            axes.legend()
        axes.set(title="Characters a second", xlabel="characters a second", ylabel="samples")

    return rate_histogram


def speakers_picture(values: Sequence[str], hours: np.ndarray) -> Callable[[Any], None]:
    """Hours of the speakers with most of them."""

    def speaker_bars(axes: Any) -> None:
        order = np.argsort(-hours, kind="stable")[:MOST_SPEAKERS]
        names = [_short(values[number]) for number in order]
        # Empty minutes of tiny datasets would all be 0.00 hours.
        unit, factor = ("hours", 1.0) if hours.max(initial=0) >= 1 else ("minutes", 60.0)
        places = np.arange(len(order))
        axes.barh(places, hours[order] * factor, color=_BLUE)
        axes.set_yticks(places, names)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        more = f", top {MOST_SPEAKERS} of {len(values)}" if len(values) > MOST_SPEAKERS else ""
        axes.set(title=f"Speech by speaker{more}", xlabel=unit)

    return speaker_bars


def waste_picture(suggestion: dict[str, Any]) -> Callable[[Any], None]:
    """Share of padding by the number of buckets, with other ways of batching beside."""

    def waste_by_buckets(axes: Any) -> None:
        buckets = [choice["buckets"] for choice in suggestion["choices"]]
        waste = [100 * (1 - choice["useful_fraction"]) for choice in suggestion["choices"]]
        axes.plot(buckets, waste, "o-", color=_BLUE, label="length buckets")
        chosen = suggestion["num_buckets"] - 1
        axes.plot(
            buckets[chosen], waste[chosen], "o", color=_ORANGE, markersize=8, label="suggested"
        )
        for name, label, dashes in (
            ("pad_to_max", "padded to the longest of all", (4, 2)),
            ("pad_to_batch_max", "random batches of 32, each to its longest", (1, 2)),
        ):
            level = 100 * (1 - suggestion[name]["useful_fraction"])
            axes.axhline(level, color=_GREY, dashes=dashes, linewidth=1.2, label=label)
        axes.set_ylim(bottom=0)
        axes.set_xticks(buckets)
        axes.legend(fontsize=8)
        axes.set(title="Padding", xlabel="number of buckets", ylabel="padded frames, %")

    return waste_by_buckets


def channels_picture(mean: np.ndarray, std: np.ndarray) -> Callable[[Any], None]:
    """Mean and standard deviation of every channel."""

    def channel_moments(axes: Any) -> None:
        channels = np.arange(len(mean))
        axes.fill_between(
            channels,
            mean - std,
            mean + std,
            step="mid",
            color=_BLUE,
            alpha=0.2,
            linewidth=0,
            label="mean ± standard deviation",
        )
        axes.step(channels, mean, where="mid", color=_BLUE, linewidth=1, label="mean")
        axes.step(
            channels, std, where="mid", color=_ORANGE, linewidth=1, label="standard deviation"
        )
        axes.margins(x=0.01, y=0.25)
        axes.legend(fontsize=8, ncols=3, loc="lower left")
        axes.set(title="Latent channels", xlabel="channel", ylabel="value")

    return channel_moments


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1] + "…"
