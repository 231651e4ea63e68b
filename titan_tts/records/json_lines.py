"""Lists with a row per line: their lines, and rows as JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchtitan.models.dit_tts.bounded import lines, parse_json
from torchtitan.models.dit_tts.errors import reading

NOT_UTF8 = "is not UTF-8; save it as UTF-8"


def text_lines(path: str, newline: str | None = None) -> Iterator[str]:
    """The lines of a list in UTF-8; other bytes are escaped. `newline`: as `open` has it."""
    # A sheet saved by a spreadsheet begins with a byte-order mark.
    with (
        reading(path, "give a list with a line for each recording"),
        open(path, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as file,
    ):
        yield from lines(file)


def is_utf8(text: str) -> bool:
    """True if a text that was read with errors="surrogateescape" was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a text; None for anything else."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
