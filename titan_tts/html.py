"""Parts of all HTML pages: templates that escape, counts with their nouns, plots as SVG."""

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import check_writable

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

PAGE_STYLE = """
:root { --ink: #1f2328; --soft: #656d76; --line: #dfe2e6; --page: #f6f7f9; --card: #fff;
  --error: #b3261e; --note: #5b6673; --good: #1a7f37; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.badge { display: inline-block; border-radius: 12px; padding: 0 10px; color: #fff;
  font-size: 12.5px; font-weight: 600; white-space: nowrap; }
.error { background: var(--error); } .note { background: var(--note); } .good { background: var(--good); }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.card { flex: 1 1 110px; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 10px 14px; }
.card b { display: block; font-size: 20px; font-weight: 650; }
.card span { color: var(--soft); font-size: 13px; }
figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px; }
figcaption { font-weight: 600; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
td.text, th.text { text-align: left; }
td:first-child { min-width: 8em; }
@media print { body { background: #fff; } }
"""
"""CSS of every page; a page's own follows and wins."""


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


def check_page(page: Path, option: str, generator: str) -> None:
    """Raises InputError where a page cannot be written, or would replace another file."""
    check_writable(page, option)
    if page.exists() and generator.encode() not in page.read_bytes()[:1024]:
        raise InputError(
            f"{option}: {page} is no page of {generator}, so it is not overwritten; give another name"
        )


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
    environment.globals["page_style"] = PAGE_STYLE
    environment.filters |= {"noun": noun, "counted": counted} | dict(filters)
    return environment.get_template(name)
