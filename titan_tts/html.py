"""Parts of all HTML pages: templates that escape, counts with their nouns, plots as SVG."""

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

PLOT_STYLE: Any = {
    # Text stays text: small, searchable, and any script is drawn in the reader's fonts.
    "svg.fonttype": "none",
    # Names may hold a dollar sign.
    "text.parse_math": False,
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
}
"""matplotlib's rcParams"""


@contextmanager
def plot_style(title: str, **style: Any) -> Iterator[None]:
    """matplotlib's settings for a plot of a page."""
    import matplotlib

    # The salt keeps the ids of one plot apart from another's on the same page.
    settings = PLOT_STYLE | style | {"svg.hashsalt": title}
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


def noun(count: int, word: str) -> str:
    """The word, in the plural unless the count is 1."""
    return word if count == 1 else f"{word}s"


def counted(count: int, word: str) -> str:
    """1 run; 1,200 runs."""
    return f"{count:,} {noun(count, word)}"


def page_template(package: str, name: str, filters: Mapping[str, Any]) -> "Template":
    """A jinja template of a package's folder, in which every value is escaped and none may be missing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"noun": noun, "counted": counted} | dict(filters)
    return environment.get_template(name)
