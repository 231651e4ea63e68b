"""Who gets which segment next: those on which the recognizers agree least come first, and no segment goes to two people
at the same time."""

import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, dropwhile, islice
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
        # Kept as edits are read, since a click may not take longer the more there are.
        self._places = {each.id: place for place, each in enumerate(self.order)}
        self._done: dict[str, Edit] = {}  # the last judgement of each segment that has enough
        self._rejected, self._seconds = 0, 0.0
        self._starts: dict[
            str, int
        ] = {}  # annotator -> no segment of `order` before is new to them
        self._skipped: defaultdict[str, set[str]] = defaultdict(set)

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
        with self._transaction():
            return {
                "done": len(self._done),
                "rejected": self._rejected,
                "all": len(self.segments),
                "hours_done": self._seconds / 3600,
                "hours": self.hours,
            }

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """With the history up to date, and without the leases that have ended."""
        with self._lock, opened(self.path) as connection:
            for edit in self.history.read(connection):
                if edit.segment in self.segments:
                    self._count(edit.segment, edit.annotator)
            now = time.time()
            self._leases = {who: held for who, held in self._leases.items() if held[1] > now}
            yield connection

    def _count(self, segment: str, annotator: str) -> None:
        """Brings the counts up to an edit that was read."""
        edits, seconds = self.history.judgements(segment), self.segments[segment].seconds
        if before := self._done.pop(segment, None):
            self._rejected -= before.action == "reject"
            self._seconds -= seconds
        if len(edits) >= self.wanted[segment]:
            self._done[segment] = edits[-1]
            self._rejected += edits[-1].action == "reject"
            self._seconds += seconds
        skipped = any(edit.action == "skip" for edit in self._edits(segment, annotator)[-1:])
        (self._skipped[annotator].add if skipped else self._skipped[annotator].discard)(segment)
        for who, start in self._starts.items():
            if self._places[segment] < start and self._is_new(segment, who):
                self._starts[who] = self._places[segment]

    def _lease(self, annotator: str, segment: str) -> None:
        self._leases[annotator] = segment, time.time() + LEASE_SECONDS

    def _choose(self, annotator: str) -> Segment | None:
        if annotator in self._leases and self._is_free(self._leases[annotator][0], annotator):
            return self.segments[self._leases[annotator][0]]
        rest = islice(self.order, self._starts.get(annotator, 0), None)
        ahead = dropwhile(lambda each: not self._is_new(each.id, annotator), rest)
        first = next(ahead, None)
        self._starts[annotator] = self._places[first.id] if first else len(self.order)
        for segment in chain([first] if first else [], ahead):
            if self._is_new(segment.id, annotator) and self._is_free(segment.id, annotator):
                return segment
        free = [each for each in self._skipped[annotator] if self._is_free(each, annotator)]
        fewest = min(
            free,
            key=lambda each: (len(self._edits(each, annotator)), self._places[each]),
            default=None,
        )
        return None if fewest is None else self.segments[fewest]

    def _is_new(self, segment: str, annotator: str) -> bool:
        """Whether neither the annotator nor as many others as are wanted have done anything about it."""
        return segment not in self._done and not self._edits(segment, annotator)

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
