"""The next segment to decide about: the recognizers' least agreement comes first, skipped segments last."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
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
        # Counted as edits are read: a click must not take longer the more there are.
        self._places = {each.id: place for place, each in enumerate(self.order)}
        self._waiting = [(0, place) for place in range(len(self.order))]  # a heap of (skips, place)
        self._done: dict[str, Edit] = {}
        self._rejected, self._seconds_done = 0, 0.0
        self._seconds = sum(each.seconds for each in self.order)

    def next(self) -> Task | None:
        """The segment that was taken back, else the first of those that were skipped least."""
        with self._transaction():
            if self._undone is not None:
                return Task(self._undone.segment)
            while self._waiting:
                skips, place = self._waiting[0]
                found = self.order[place]
                if found.id not in self._done and len(self.history.of(found.id)) == skips:
                    return Task(found)
                heappop(self._waiting)  # it was decided about or skipped since
            return None

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
            return {
                "done": len(self._done),
                "rejected": self._rejected,
                "all": len(self.segments),
                "hours_done": self._seconds_done / 3600,
                "hours": self._seconds / 3600,
            }

    def _count(self, segment: str) -> None:
        """Brings the counts and what waits up to the segment's edits."""
        seconds = self.segments[segment].seconds
        if before := self._done.pop(segment, None):
            self._rejected -= before.action == "reject"
            self._seconds_done -= seconds
        if now := self.history.decision(segment):
            self._done[segment] = now
            self._rejected += now.action == "reject"
            self._seconds_done += seconds
        else:
            heappush(self._waiting, (len(self.history.of(segment)), self._places[segment]))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """With the history up to date."""
        with self._lock, opened(self.path) as connection:
            for segment in self.history.read(connection):
                if segment in self.segments:
                    self._count(segment)
            yield connection


def _append(connection: sqlite3.Connection, segment: Segment, *decision: str | None) -> None:
    """`decision`: action, text and text_verbatim."""
    row = (segment.id, "", time.time(), *decision, segment.place)
    connection.execute("INSERT INTO edits VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row)
