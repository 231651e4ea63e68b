"""The decisions, in SQLite: one append-only table of edits, from which every state is derived.

    id  segment             action  text     text_verbatim
    1   1f..-00000-00004    accept  Hello.   uh hello
    2   1f..-00000-00004    undo                                  # row 1 no longer counts
    3   1f..-00000-00004    reject  Hello.   uh hello             # the segment is rejected

An undo takes back the last row of the segment that still counts. The column `audio` says where the audio was that was
heard; what was decided about other audio than the segment's does not count. The column `annotator` is of earlier versions.
"""

import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.models.dit_tts.errors import InputError, show

MANIFEST_SUFFIX = ".jsonl"

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS edits (id INTEGER PRIMARY KEY AUTOINCREMENT, segment TEXT NOT NULL, "
    "annotator TEXT NOT NULL, time REAL NOT NULL, action TEXT NOT NULL, text TEXT, text_verbatim TEXT, "
    "audio TEXT)",
    "CREATE TABLE IF NOT EXISTS access (one INTEGER PRIMARY KEY CHECK (one = 1), token TEXT)",
)
# SQLite keeps a value of any kind, and the folder may be another person's.
_TEXTS = ("segment", "action", "text", "text_verbatim", "audio")
_ROWS = f"SELECT id, {', '.join(f'CAST({name} AS TEXT)' for name in _TEXTS)} FROM edits ORDER BY id"


class Edit(NamedTuple):
    """A row of the table."""

    id: int
    segment: str
    action: str
    text: str | None
    text_verbatim: str | None
    audio: str | None  # `Segment.place`


def database_path(target: Path) -> Path:
    """The database of a collected folder, OUTPUT/annotations.sqlite, or of a manifest, NAME.annotations.sqlite."""
    if target.suffix == MANIFEST_SUFFIX:
        return target.with_suffix(".annotations.sqlite")
    return target / "annotations.sqlite"


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction, on disk when the block ends and undone where it raises. No other writer interleaves."""
    try:
        # Which rolls back what was not committed.
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
    except sqlite3.DatabaseError as error:
        raise InputError(
            f"{path} cannot be used ({error}); check the disk and its rights, or restore a copy of it"
        ) from error


def create(path: Path) -> str:
    """Makes the tables where they are missing. Returns the token of the page's address, which a restart keeps."""
    with opened(path) as connection:
        for statement in _SCHEMA:
            connection.execute(statement)
        token = secrets.token_urlsafe(16)
        connection.execute("INSERT OR IGNORE INTO access VALUES (1, ?)", [token])
        return str(connection.execute("SELECT token FROM access").fetchone()[0])


def read_edits(path: Path, audio: Mapping[str, str]) -> tuple[dict[str, list[Edit]], set[str]]:
    """({segment: edits that count, oldest first}, segments with edits about other audio, which do not count).

    `audio`: {segment: where its audio is}; of a segment that is not in it, any edit counts.
    """
    counting: dict[str, list[Edit]] = {}
    of_other_audio = set()
    with opened(path) as connection:
        rows = [Edit(*row) for row in connection.execute(_ROWS)]
    for edit in rows:
        edits = counting.setdefault(edit.segment, [])
        if audio.get(edit.segment, edit.audio) != edit.audio:
            of_other_audio.add(edit.segment)
        elif edit.action != "undo":
            edits.append(edit)
        elif edits:
            edits.pop()
    return counting, of_other_audio


def decision(edits: Sequence[Edit]) -> Edit | None:
    """The newest accept or reject of a segment's edits."""
    return next((edit for edit in reversed(edits) if edit.action != "skip"), None)


def annotations(
    folder: str | Path, audio: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any] | None]:
    """The decision about every annotated segment of a collected folder (or a manifest's path). With `audio`, see
    `read_edits`, those about other audio are left out, and their number is printed.

    Returns:
        {segment id: {"annotated": True, "text", and "text_verbatim" where it has one}, or None where it was rejected}
    """
    path = database_path(Path(folder))
    if not path.exists():
        return {}
    counting, of_other_audio = read_edits(path, audio or {})
    found: dict[str, dict[str, Any] | None] = {}
    for segment, edits in counting.items():
        if edit := decision(edits):
            texts = {"text": edit.text, "text_verbatim": edit.text_verbatim}
            kept = {name: text for name, text in texts.items() if text is not None}
            found[segment] = {"annotated": True, **kept} if edit.action == "accept" else None
    if count := len(of_other_audio - found.keys()):
        show(f"{count} annotations are of other audio than their rows name now; they are left out")
    return found
