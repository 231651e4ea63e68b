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
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.errors import InputError, show

MANIFEST_SUFFIX = ".jsonl"

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS edits (id INTEGER PRIMARY KEY AUTOINCREMENT, segment TEXT NOT NULL, "
    "annotator TEXT NOT NULL, time REAL NOT NULL, action TEXT NOT NULL, text TEXT, text_verbatim TEXT, "
    "audio TEXT)",
    "CREATE TABLE IF NOT EXISTS access (one INTEGER PRIMARY KEY CHECK (one = 1), token TEXT)",
)


@dataclass(frozen=True)
class Edit:
    """A row of the history."""

    id: int
    segment: str
    action: str
    text: str | None
    text_verbatim: str | None
    audio: str | None  # `Segment.place`


class History:
    """The edits that count, replayed from the table; `read` adds the rows since the last one.

    Attributes:
        counting: {segment: edits that were not undone, oldest first}.
        of_other_audio: segments with edits that do not count, because they are about other audio.
    """

    def __init__(self, audio: Mapping[str, str]):
        """`audio`: {segment: where its audio is}; of a segment that is not in it, any edit counts."""
        self.counting: dict[str, list[Edit]] = {}
        self.of_other_audio: set[str] = set()
        self._audio, self._last_id = audio, 0
        self._by_id: dict[int, Edit] = {}  # those that count

    def read(self, connection: sqlite3.Connection) -> list[str]:
        """Returns the segment of each new row."""
        read = []
        # SQLite keeps a value of any kind, and the folder may be another person's.
        columns = ", ".join(
            f"CAST({each.name} AS {'INTEGER' if each.type is int else 'TEXT'})"
            for each in fields(Edit)
        )
        statement = f"SELECT {columns} FROM edits WHERE id > ? ORDER BY id"
        for row in connection.execute(statement, [self._last_id]):
            edit = Edit(*row)
            self._last_id = edit.id
            if self._audio.get(edit.segment, edit.audio) != edit.audio:
                self.of_other_audio.add(edit.segment)
                continue
            edits = self.counting.setdefault(edit.segment, [])
            read.append(edit.segment)
            if edit.action != "undo":
                edits.append(edit)
                self._by_id[edit.id] = edit
            elif edits:
                del self._by_id[edits.pop().id]
        return read

    def of(self, segment: str) -> list[Edit]:
        return self.counting.get(segment, [])

    def decision(self, segment: str) -> Edit | None:
        """Its newest accept or reject."""
        return next((edit for edit in reversed(self.of(segment)) if edit.action != "skip"), None)

    def last(self) -> Edit | None:
        """The latest edit that counts, which an undo would take back."""
        return next(reversed(self._by_id.values()), None)


def database_path(target: Path) -> Path:
    """The database of a collected folder, OUTPUT/annotations.sqlite, or of a manifest, NAME.annotations.sqlite."""
    if target.suffix == MANIFEST_SUFFIX:
        return target.with_suffix(".annotations.sqlite")
    return target / "annotations.sqlite"


@contextmanager
def opened(path: Path, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """A transaction, on disk when the block ends and undone where it raises. By default no other writer interleaves."""
    try:
        # Which rolls back what was not committed.
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
            connection.execute(begin)
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


def annotations(
    folder: str | Path, audio: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any] | None]:
    """The decision about every annotated segment of a collected folder (or a manifest's path). With `audio`, see
    History, those about other audio are left out, and their number is printed.

    Returns:
        {segment id: {"annotated": True, "text", and "text_verbatim" where it has one}, or None where it was rejected}
    """
    path = database_path(Path(folder))
    if not path.exists():
        return {}
    history = History(audio or {})
    with opened(path, "BEGIN") as connection:
        history.read(connection)
    found: dict[str, dict[str, Any] | None] = {}
    for segment in history.counting:
        if (edit := history.decision(segment)) is None:
            continue
        texts = {"text": edit.text, "text_verbatim": edit.text_verbatim}
        kept = {name: text for name, text in texts.items() if text is not None}
        found[segment] = {"annotated": True, **kept} if edit.action == "accept" else None
    if count := len(history.of_other_audio - found.keys()):
        show(f"{count} annotations are of other audio than their rows name now; they are left out")
    return found
