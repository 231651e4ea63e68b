"""Who gets which segment next: those on which the recognizers agree least come first, and no segment goes to two people
at the same time."""

import heapq
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


class Taken(InputError):
    """A segment that somebody else has or has annotated."""


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
        self._place = {each.id: number for number, each in enumerate(self.order)}
        # Kept up to date by _note, as there may be many segments.
        self._heaps: dict[str, list[int]] = {}
        self._done: dict[str, tuple[int, int, int]] = {}
        self._totals = (0, 0, 0)  # segments done, rejected ones and milliseconds
        self._pairs: dict[str, list[Edit]] = {}

    def next(self, annotator: str) -> Task | None:
        """The segment that the annotator has a lease of, else the first that is free; skipped ones come last."""
        with self._transaction() as (connection, leases):
            mine = [i for i, names in leases.items() if annotator in names and i in self.segments]
            mine = [i for i in mine if self._is_free(i, annotator, leases)]
            chosen = self.segments[mine[0]] if mine else self._choose(annotator, leases)
            if chosen is None:
                return None
            _lease(connection, annotator, chosen.id)
            return Task(chosen)

    def judge(
        self, annotator: str, segment: str, action: str, text: str, text_verbatim: str | None
    ) -> None:
        """Keeps an accept, a reject or a skip. The same decision again, which a page may send after a lost answer, is
        not kept twice. Raises Taken, InputError."""
        if action == "accept" and not text.strip():
            raise InputError("an accepted segment needs a text; reject it if nobody speaks")
        decision = (action, text, text_verbatim)
        with self._transaction() as (connection, leases):
            last = [(e.action, e.text, e.text_verbatim) for e in self._edits(segment, annotator)]
            if action != "skip" and last[-1:] == [decision]:
                return
            others = self._others(segment, annotator, leases)
            if len(others) >= self.wanted[segment]:
                raise Taken(f"{' and '.join(sorted(others))} took this segment meanwhile")
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
        with self._transaction():
            done, rejected, milliseconds = self._totals
        counts = {"done": done, "rejected": rejected, "all": len(self.segments)}
        return counts | {"hours_done": milliseconds / 3.6e6, "hours": self.hours}

    def pairs(self) -> list[tuple[Segment, Edit, Edit]]:
        """The segments that two people judged, with their judgements in the order of the names."""
        with self._transaction():
            pairs = list(self._pairs.items())
        ordered = [(i, sorted(edits[:2], key=lambda edit: edit.annotator)) for i, edits in pairs]
        return [(self.segments[i], first, second) for i, (first, second) in ordered]

    def _note(self, edit: Edit) -> None:
        """Brings what is counted up to date."""
        i = edit.segment
        judged, new = self.history.judgements(i), (0, 0, 0)
        if len(judged) >= self.wanted[i]:
            milliseconds = round(1000 * self.segments[i].seconds)
            new = (1, int(judged[-1].action == "reject"), milliseconds)
        changes = zip(self._totals, new, self._done.pop(i, (0, 0, 0)), strict=True)
        done, rejected, length = (total + now - before for total, now, before in changes)
        self._totals, self._done[i] = (done, rejected, length), new
        self._pairs.pop(i, None)
        if len(judged) > 1:
            self._pairs[i] = judged
        if edit.action == "undo":  # it may be free again
            for heap in self._heaps.values():
                heapq.heappush(heap, self._place[i])

    @contextmanager
    def _transaction(self) -> Iterator[tuple[sqlite3.Connection, dict[str, set[str]]]]:
        """With the history up to date, and the leases that have not ended: {segment: annotators}."""
        with self._lock, opened(self.path) as connection:
            for edit in self.history.read(connection):
                if edit.segment in self.segments:
                    self._note(edit)
            leases: dict[str, set[str]] = {}
            query = "SELECT segment, annotator FROM leases WHERE until > ?"
            for segment, annotator in connection.execute(query, [time.time()]):
                leases.setdefault(segment, set()).add(annotator)
            yield connection, leases

    def _choose(self, annotator: str, leases: dict[str, set[str]]) -> Segment | None:
        """The first free segment that the annotator has not skipped, else the one least often skipped.

        The annotator's heap has times skipped * segments + place in the order. What is judged leaves it, until an undo.
        """
        count, held, chosen = len(self.order), [], None
        heap = self._heaps.setdefault(annotator, list(range(count)))
        while heap and chosen is None:
            entry = heapq.heappop(heap)
            times, place = divmod(entry, count)
            segment = self.order[place]
            now = len(self._edits(segment.id, annotator))
            if not self._is_free(segment.id, annotator, {}):
                continue
            if now != times:
                heapq.heappush(heap, now * count + place)
                continue
            held.append(entry)
            if self._is_free(segment.id, annotator, leases):
                chosen = segment
        for entry in held:
            heapq.heappush(heap, entry)
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
