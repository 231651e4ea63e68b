"""The next segment to decide about: the recognizers' least agreement comes first, skipped segments last."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from titan_tts.annotate.segments import Segment
from titan_tts.annotate.store import Edit, History, create, opened
from torchtitan.models.dit_tts.errors import InputError


class Task(NamedTuple):
    """A segment to decide about; `undone`: the decision about it that was taken back."""

    segment: Segment
    undone: Edit | None = None


class Desk:
    """The segments of a collection with their history, for several threads. `token` is what requests must have."""

    def __init__(self, path: Path, segments: dict[str, Segment]):
        self.path, self.segments = path, segments
        self.order = sorted(segments.values(), key=lambda each: (each.agreement, each.id))
        self.history = History({i: each.place for i, each in segments.items()})
        self._lock, self.token = Lock(), create(path)
        self._undone: Task | None = None  # what comes next, because it was taken back

    def next(self) -> Task | None:
        """The segment that was taken back, else the first of those that were skipped least."""
        with self._transaction():
            if self._undone is not None:
                return Task(self._undone.segment)
            done = self.history.decisions()
            left = (each for each in self.order if each.id not in done)
            found = min(left, key=lambda each: len(self.history.of(each.id)), default=None)
            return None if found is None else Task(found)

    def judge(self, segment: str, action: str, text: str, text_verbatim: str | None) -> None:
        """Keeps an accept, a reject or a skip. The same decision again, which a page may send after a lost answer, is
        not kept twice."""
        if action == "accept" and not text.strip():
            raise InputError("an accepted segment needs a text; reject it if nobody speaks")
        decision = (action, text, text_verbatim)
        with self._transaction() as connection:
            last = [(e.action, e.text, e.text_verbatim) for e in self.history.of(segment)[-1:]]
            if action == "skip" or last != [decision]:
                _append(connection, self.segments[segment], *decision)
            self._undone = None

    def undo(self) -> Task:
        """Takes back the last decision. Raises InputError where there is none."""
        with self._transaction() as connection:
            edit = self.history.last()
            if edit is None or edit.segment not in self.segments:
                raise InputError("there is nothing to undo")
            self._undone = Task(self.segments[edit.segment], edit)
            _append(connection, self._undone.segment, "undo", None, None)
            return self._undone

    def progress(self) -> dict[str, Any]:
        """Counts and hours of what is decided, and of all."""
        with self._transaction():
            decisions = self.history.decisions()
        done = {i: edit for i, edit in decisions.items() if i in self.segments}
        return {
            "done": len(done),
            "rejected": sum(edit.action == "reject" for edit in done.values()),
            "all": len(self.segments),
            "hours_done": sum(self.segments[i].seconds for i in done) / 3600,
            "hours": sum(each.seconds for each in self.order) / 3600,
        }

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """With the history up to date."""
        with self._lock, opened(self.path) as connection:
            self.history.read(connection)
            yield connection


def _append(connection: sqlite3.Connection, segment: Segment, *decision: str | None) -> None:
    """`decision`: action, text and text_verbatim."""
    row = (segment.id, "", time.time(), *decision, segment.place)
    connection.execute("INSERT INTO edits VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row)
