"""Who gets which segment next: those on which the recognizers agree least come first, and no segment goes to two people
at the same time."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from titan_tts.annotate.segments import Segment
from titan_tts.annotate.store import Edit, History, create, opened
from titan_tts.prepare.recordings import drawn
from torchtitan.models.dit_tts.errors import InputError

LEASE_SECONDS = 600.0
"""A segment that was given to somebody so long ago may go to somebody else"""


class Task(NamedTuple):
    """A segment for an annotator; `undone`: the decision about it that was taken back."""

    segment: Segment
    undone: Edit | None = None


class Assignments:
    """The segments of a collection with their history and leases; threads and several servers may share the database.
    `token` is what requests to a server must have."""

    def __init__(self, path: Path, segments: dict[str, Segment], double: float = 0.0):
        """`double`: fraction of the segments that two people annotate."""
        self.path, self.segments = path, segments
        self.order = sorted(segments.values(), key=lambda each: (each.agreement, each.id))
        self.hours = sum(each.seconds for each in segments.values()) / 3600
        # Not the draw of `prepare --heldout-fraction`, which would take the same segments.
        self.wanted = {i: 1 + (drawn(f"annotated twice: {i}", 0) < double) for i in segments}
        self.history = History({i: each.place for i, each in segments.items()})
        self._lock, self.token = Lock(), create(path)

    def next(self, annotator: str) -> Task | None:
        """The segment that the annotator has a lease of, else the first that is free; skipped ones come last."""
        with self._transaction() as (connection, leases):
            chosen = self._choose(annotator, leases)
            if chosen is None:
                return None
            _lease(connection, annotator, chosen.id)
            return Task(chosen)

    def judge(
        self, annotator: str, segment: str, action: str, text: str, text_verbatim: str | None
    ) -> None:
        """Keeps an accept, a reject or a skip. The same decision again, which a page may send after a lost answer, is
        not kept twice. Raises InputError, also where somebody else has the segment."""
        if action == "accept" and not text.strip():
            raise InputError("an accepted segment needs a text; reject it if nobody speaks")
        decision = (action, text, text_verbatim)
        with self._transaction() as (connection, leases):
            last = [(e.action, e.text, e.text_verbatim) for e in self._edits(segment, annotator)]
            if action != "skip" and last[-1:] == [decision]:
                return
            others = self._others(segment, annotator, leases)
            if len(others) >= self.wanted[segment]:
                raise InputError(f"{' and '.join(sorted(others))} took this segment meanwhile")
            _append(connection, self.segments[segment], annotator, *decision)
            _lease(connection, annotator, None)

    def undo(self, annotator: str) -> Task:
        """Takes back the annotator's last decision, whose segment is theirs again. Raises InputError without one."""
        with self._transaction() as (connection, _):
            edit = self.history.last_of(annotator)
            if edit is None or edit.segment not in self.segments:
                raise InputError("there is nothing to undo")
            segment = self.segments[edit.segment]
            _append(connection, segment, annotator, "undo", None, None)
            _lease(connection, annotator, segment.id)
            return Task(segment, edit)

    def progress(self) -> dict[str, Any]:
        """Counts and hours of what is annotated by as many people as are wanted, and of all."""
        done = [(i, e[-1]) for i, e in self._judged().items() if len(e) >= self.wanted[i]]
        return {
            "done": len(done),
            "rejected": sum(edit.action == "reject" for _, edit in done),
            "all": len(self.segments),
            "hours_done": sum(self.segments[i].seconds for i, _ in done) / 3600,
            "hours": self.hours,
        }

    def pairs(self) -> list[tuple[Segment, Edit, Edit]]:
        """The segments that two people judged, with their judgements in the order of the names."""
        found = []
        for i, edits in self._judged().items():
            if len(edits) > 1:
                first, second = sorted(edits[:2], key=lambda edit: edit.annotator)
                found.append((self.segments[i], first, second))
        return found

    def _judged(self) -> dict[str, list[Edit]]:
        with self._transaction():
            known = [i for i in self.history.counting if i in self.segments]
            return {i: edits for i in known if (edits := self.history.judgements(i))}

    @contextmanager
    def _transaction(self) -> Iterator[tuple[sqlite3.Connection, dict[str, set[str]]]]:
        """With the history up to date, and the leases that have not ended: {segment: annotators}."""
        with self._lock, opened(self.path) as connection:
            self.history.read(connection)
            leases: dict[str, set[str]] = {}
            query = "SELECT segment, annotator FROM leases WHERE until > ?"
            for segment, annotator in connection.execute(query, [time.time()]):
                leases.setdefault(segment, set()).add(annotator)
            yield connection, leases

    def _choose(self, annotator: str, leases: dict[str, set[str]]) -> Segment | None:
        for i, names in leases.items():
            if annotator in names and i in self.segments and self._is_free(i, annotator, leases):
                return self.segments[i]
        chosen, fewest = None, 0
        for segment in self.order:
            if self._is_free(segment.id, annotator, leases):
                skipped = len(self._edits(segment.id, annotator))
                if chosen is None or skipped < fewest:
                    chosen, fewest = segment, skipped
                if not skipped:
                    break
        return chosen

    def _edits(self, segment: str, annotator: str) -> list[Edit]:
        return self.history.counting.get(segment, {}).get(annotator, [])

    def _others(self, segment: str, annotator: str, leases: dict[str, set[str]]) -> set[str]:
        judges = {edit.annotator for edit in self.history.judgements(segment)}
        return (judges | leases.get(segment, set())) - {annotator}

    def _is_free(self, segment: str, annotator: str, leases: dict[str, set[str]]) -> bool:
        judged = any(edit.action != "skip" for edit in self._edits(segment, annotator)[-1:])
        return not judged and len(self._others(segment, annotator, leases)) < self.wanted[segment]


def _lease(connection: sqlite3.Connection, annotator: str, segment: str | None) -> None:
    """The one segment that the annotator has, if any."""
    connection.execute("DELETE FROM leases WHERE annotator = ?", [annotator])
    if segment is not None:
        row = (segment, annotator, time.time() + LEASE_SECONDS)
        connection.execute("INSERT INTO leases VALUES (?, ?, ?)", row)


def _append(
    connection: sqlite3.Connection, segment: Segment, annotator: str, *decision: str | None
) -> None:
    """`decision`: action, text and text_verbatim."""
    row = (segment.id, annotator, time.time(), *decision, segment.place)
    connection.execute("INSERT INTO edits VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row)
