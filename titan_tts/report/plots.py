"""matplotlib's plots as SVG elements in the colors of the page, light or dark."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

INK, LINE = "#1f2328", "#d9dee3"
"""colors of text and of lines, which become those of the page"""

_STYLE: Any = {
    # Text stays text: small, searchable, and any script is drawn in the reader's fonts.
    "svg.fonttype": "none",
    # Names may hold a dollar sign.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.facecolor": "none",
    "legend.frameon": False,
}


@contextmanager
def plot_style(title: str, **style: Any) -> Iterator[None]:
    """matplotlib's settings for a plot of a page."""
    import matplotlib

    # The salt keeps the ids of one plot apart from another's on the same page.
    settings = _STYLE | style | {"svg.hashsalt": title}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # matplotlib guesses the widths of glyphs that its own font lacks, which is near enough.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def svg_element(figure: Any) -> str:
    """A figure as an `<svg>` element without a date."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def for_page(svg: str, title: str) -> str:
    """The element with its name for a screen reader, the page's colors, and a width at which it can still be read."""
    points = float((re.search(r'width="([\d.]+)pt"', svg) or ["", "360"])[1])
    attributes = f'role="img" aria-label="{escape(title)}" style="min-width: {0.9 * points:.0f}px"'
    colored = svg.replace(INK, "var(--ink)").replace(LINE, "var(--line)")
    return colored.replace("<svg ", f"<svg {attributes} ", 1)
