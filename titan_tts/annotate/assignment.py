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
    """The segments of a collection with their history, for several threads. What several servers decide at the same time
    is kept apart by transactions. `token` is what requests to a server must have."""

    def __init__(self, path: Path, segments: dict[str, Segment], double: float = 0.0):
        """`double`: fraction of the segments that two people annotate."""
        self.path, self.segments = path, segments
        self.order = sorted(segments.values(), key=lambda each: (each.agreement, each.id))
        self.hours = sum(each.seconds for each in segments.values()) / 3600
        # Not the draw of `prepare --heldout-fraction`, which would take the same segments.
        self.wanted = {i: 1 + (drawn(f"annotated twice: {i}", 0) < double) for i in segments}
        self.history = History({i: each.place for i, each in segments.items()})
        self._lock, self.token = Lock(), create(path)
        self._leases: dict[str, tuple[str, float]] = {}  # annotator -> segment, and until when

    def next(self, annotator: str) -> Task | None:
        """The segment that the annotator has a lease of, else the first that is free; skipped ones come last."""
        with self._transaction():
            chosen = self._choose(annotator)
            if chosen is None:
                return None
            self._lease(annotator, chosen.id)
            return Task(chosen)

    def judge(
        self, annotator: str, segment: str, action: str, text: str, text_verbatim: str | None
    ) -> None:
        """Keeps an accept, a reject or a skip. The same decision again, which a page may send after a lost answer, is
        not kept twice. Raises InputError, also where somebody else has the segment."""
        if action == "accept" and not text.strip():
            raise InputError("an accepted segment needs a text; reject it if nobody speaks")
        decision = (action, text, text_verbatim)
        with self._transaction() as connection:
            last = [(e.action, e.text, e.text_verbatim) for e in self._edits(segment, annotator)]
            if action != "skip" and last[-1:] == [decision]:
                return
            others = self._others(segment, annotator)
            if len(others) >= self.wanted[segment]:
                raise InputError(f"{' and '.join(sorted(others))} took this segment meanwhile")
            _append(connection, self.segments[segment], annotator, *decision)
            self._leases.pop(annotator, None)

    def undo(self, annotator: str) -> Task:
        """Takes back the annotator's last decision, whose segment is theirs again. Raises InputError without one."""
        with self._transaction() as connection:
            edit = self.history.last_of(annotator)
            if edit is None or edit.segment not in self.segments:
                raise InputError("there is nothing to undo")
            segment = self.segments[edit.segment]
            _append(connection, segment, annotator, "undo", None, None)
            self._lease(annotator, segment.id)
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
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """With the history up to date, and without the leases that have ended."""
        with self._lock, opened(self.path) as connection:
            self.history.read(connection)
            now = time.time()
            self._leases = {who: held for who, held in self._leases.items() if held[1] > now}
            yield connection

    def _lease(self, annotator: str, segment: str) -> None:
        self._leases[annotator] = segment, time.time() + LEASE_SECONDS

    def _choose(self, annotator: str) -> Segment | None:
        if annotator in self._leases and self._is_free(self._leases[annotator][0], annotator):
            return self.segments[self._leases[annotator][0]]
        chosen, fewest = None, 0
        for segment in self.order:
            if self._is_free(segment.id, annotator):
                skipped = len(self._edits(segment.id, annotator))
                if chosen is None or skipped < fewest:
                    chosen, fewest = segment, skipped
                if not skipped:
                    break
        return chosen

    def _edits(self, segment: str, annotator: str) -> list[Edit]:
        return self.history.counting.get(segment, {}).get(annotator, [])

    def _others(self, segment: str, annotator: str) -> set[str]:
        judges = {edit.annotator for edit in self.history.judgements(segment)}
        holders = {who for who, (held, _) in self._leases.items() if held == segment}
        return (judges | holders) - {annotator}

    def _is_free(self, segment: str, annotator: str) -> bool:
        judged = any(edit.action != "skip" for edit in self._edits(segment, annotator)[-1:])
        return not judged and len(self._others(segment, annotator)) < self.wanted[segment]


def _append(
    connection: sqlite3.Connection, segment: Segment, annotator: str, *decision: str | None
) -> None:
    """`decision`: action, text and text_verbatim."""
    row = (segment.id, annotator, time.time(), *decision, segment.place)
    connection.execute("INSERT INTO edits VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row)
