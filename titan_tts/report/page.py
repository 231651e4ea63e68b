"""A page and its parts. Each part knows what a browser shows of it and what a terminal does.

    page = Page("My report", [Table(("name", "seconds"), [["a", "1.5"]], title="Times")], cards={"runs": "1"})
    page.write(Path("report.html"))
    show(page.text())

Everything that a part is given may come from a stranger's files: the template escapes it.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titan_tts.report.plots import for_page
from titan_tts.report.words import aligned
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import check_writable, write_atomic

if TYPE_CHECKING:
    from jinja2 import Template

STYLE = Path(__file__).with_name("page.css")

Kind = Literal["", "error", "warning", "note", "good"]
"""color of a badge"""


@dataclass(frozen=True)
class Cell:
    """A cell of a table with more than its text."""

    text: str
    small: str = ""
    """a second line; behind the text, in brackets, on a terminal"""

    badge: Kind = ""
    value: float | None = None
    """what the column is sorted by, if not by the text"""

    def __str__(self) -> str:
        return f"{self.text} ({self.small})" if self.small else self.text


@dataclass(frozen=True)
class Note:
    """A paragraph for the browser only; a string is one for both."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of strings or cells; of too many the first are shown, and it says where the rest is."""

    head: Sequence[str]
    """empty: the first column is the names of the second"""

    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    left: Collection[int] = (0,)
    """places of the columns of text; the others hold numbers"""

    sortable: bool = False
    max_rows: int = 1000
    on_terminal: int = 20
    """maximum rows there; 0: the table is for the browser only"""

    rest: str = "left out here"
    """where the rows above the maximum are, such as `in summary.csv`"""

    total: int | None = None
    """number of rows, if `rows` are a part of them"""

    def more(self, most: int) -> str:
        """A sentence about the rows that are not shown; empty: all are."""
        count = (len(self.rows) if self.total is None else self.total) - min(most, len(self.rows))
        return f"{count:,} more {self.rest}" if count > 0 else ""


@dataclass(frozen=True)
class Figure:
    """A plot; a terminal shows nothing of it."""

    title: str
    svg: str

    @property
    def element(self) -> str:
        return for_page(self.svg, self.title)


@dataclass(frozen=True)
class Sound:
    """A player, with a spectrogram where there is one."""

    label: str
    seconds: float
    url: str
    picture: str = ""
    width: float = 100.0
    """percent of the longest sound of its text"""

    verdict: str = ""
    verdict_kind: Kind = ""
    words: Sequence[tuple[str, str, str]] = ()
    """(word, kind, expected word) as heard; the kind is right, wrong, extra or missing"""

    note: str = ""


@dataclass(frozen=True)
class Audio:
    """A text, and its sounds below each other. A terminal shows nothing of it."""

    text: str
    note: str
    sounds: Sequence[Sound]


@dataclass(frozen=True)
class Section:
    """Parts below a heading."""

    title: str
    parts: Sequence["Part"]
    on_terminal: bool = True


@dataclass(frozen=True)
class Details:
    """Parts that a browser folds away below their title."""

    title: str
    parts: Sequence["Part"]
    badge: str = ""
    kind: Kind = ""
    count: str = ""
    open: bool = False


Part = str | Note | Table | Figure | Audio | Section | Details


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    parts: Sequence[Part]
    cards: Mapping[str, str] = field(default_factory=dict)
    """name -> figure"""

    badge: str = ""
    kind: Kind = ""
    about: str = ""
    """a sentence below the title"""

    warnings: Sequence[str] = ()
    """for the browser; a command prints them to stderr itself"""

    data: Mapping[str, Any] = field(default_factory=dict)
    """the same for programs"""

    generator: str = "titan-tts"
    """the command that wrote it, by which it knows a page of its own"""

    def html(self) -> str:
        return _template().render(page=self, style=STYLE.read_text(encoding="utf-8"))

    def write(self, path: Path) -> int:
        """Writes the HTML; returns its bytes. Halves of surrogate pairs, as names of files may have, are escaped."""
        content = self.html().encode("utf-8", "backslashreplace")
        write_atomic(path, content)
        return len(content)

    def text(self) -> str:
        """Lines for a terminal."""
        lines = [self.title, f"{self.badge}: {self.about}" if self.badge else self.about]
        if self.cards:
            lines += ["", *aligned([*self.cards.items()], (0, 1))]
        return "\n".join([*filter(None, lines[:2]), *lines[2:], *_lines(self.parts)])

    def json(self) -> str:
        """`data` in one object, without what a terminal would obey or UTF-8 cannot hold."""
        text = json.dumps(self.data, ensure_ascii=False, allow_nan=False, indent=1)
        return re.sub("[\x7f-\x9f\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def check_page(page: Path, option: str, generator: str) -> None:
    """Raises InputError where a page cannot be written, or would replace another file."""
    check_writable(page, option)
    if page.exists() and generator.encode() not in page.read_bytes()[:1024]:
        raise InputError(
            f"{option}: {page} is not a page of {generator}, so it is not overwritten; give another name"
        )


def _lines(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        match part:
            case str():
                yield part
            case Table() if part.rows and part.on_terminal:
                rows = [[*map(str, row)] for row in part.rows[: part.on_terminal]]
                yield from ("", part.title) if part.title else [""] * bool(part.head)
                yield from aligned([[*part.head], *rows] if part.head else rows, part.left)
                yield from filter(None, [part.more(part.on_terminal)])
            case Section(title, inner, True) if inner:
                inside = dropwhile(lambda line: not line, _lines(inner))
                yield from ("", title, *(f"  {line}".rstrip() for line in inside))
            case Details(title, inner, badge, _, count):
                yield f"{badge:8}{count:>9}  {title}"
                yield from (f"{'':8}{line}".rstrip() for line in _lines(inner))


@cache
def _template() -> "Template":
    """The template, in which every value is escaped and none may be missing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("titan_tts.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    return environment.get_template("page.html.jinja")
