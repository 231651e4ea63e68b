"""The next segment to decide about: the recognizers' least agreement comes first, skipped segments last."""

import time
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from titan_tts.annotate.segments import Segment
from titan_tts.annotate.store import Edit, create, decision, opened, read_edits
from torchtitan.models.dit_tts.errors import InputError


class Desk:
    """The segments of a collection with their edits, for several threads. `token` is what requests must have."""

    def __init__(self, path: Path, segments: dict[str, Segment]):
        self.path, self.segments = path, segments
        self._lock, self.token = Lock(), create(path)
        counting, _ = read_edits(path, {i: each.place for i, each in segments.items()})
        self._edits = {i: counting.get(i, []) for i in segments}
        # All edits of what is not decided are skips.
        waiting = (each for i, each in segments.items() if decision(self._edits[i]) is None)
        order = sorted(waiting, key=lambda one: (len(self._edits[one.id]), one.agreement, one.id))
        self._waiting = OrderedDict.fromkeys(each.id for each in order)
        # Kept up to date, so that a decision costs the same however many segments there are.
        self._made = sorted(edit for edits in self._edits.values() for edit in edits)
        self._done = self._rejected = self._microseconds = 0
        self._hours = sum(each.seconds for each in segments.values()) / 3600
        for segment in segments:
            self._count(segment, 1)

    def next(self) -> Segment | None:
        """The segment that was taken back, else the first of those that were skipped least."""
        with self._lock:
            first = next(iter(self._waiting), None)
            return None if first is None else self.segments[first]

    def judge(self, segment: str, action: str, text: str, text_verbatim: str | None) -> None:
        """Keeps an accept, a reject or a skip. The same decision again, which a page may send after a lost answer, is
        not kept twice."""
        if action == "accept" and not text.strip():
            raise InputError("an accepted segment needs a text; reject it if nobody speaks")
        now = (action, text, text_verbatim)
        with self._lock:
            edits = self._edits[segment]
            last = [(edit.action, edit.text, edit.text_verbatim) for edit in edits[-1:]]
            if action == "skip" or last != [now]:
                edit = self._write(segment, *now)
                self._count(segment, -1)
                edits.append(edit)
                self._made.append(edit)
                self._count(segment, 1)
            self._waiting.pop(segment, None)
            if decision(edits) is None:
                self._waiting[segment] = None

    def undo(self) -> tuple[Segment, Edit]:
        """Takes back the last decision, whose segment comes next. Raises InputError where there is none."""
        with self._lock:
            if not self._made:
                raise InputError("there is nothing to undo")
            last = self._made[-1]
            self._write(last.segment, "undo", None, None)
            self._count(last.segment, -1)
            self._made.pop()
            self._edits[last.segment].pop()
            self._count(last.segment, 1)
            self._waiting[last.segment] = None
            self._waiting.move_to_end(last.segment, last=False)
            return self.segments[last.segment], last

    def progress(self) -> dict[str, Any]:
        """Counts and hours of what is decided, and of all."""
        with self._lock:
            return {
                "done": self._done,
                "rejected": self._rejected,
                "all": len(self.segments),
                "hours_done": self._microseconds / 3.6e9,
                "hours": self._hours,
            }

    def _count(self, segment: str, sign: int) -> None:
        """Adds a segment to the progress, or takes it out of it."""
        if edit := decision(self._edits[segment]):
            self._done += sign
            self._rejected += sign * (edit.action == "reject")
            # Whole, as sums and differences of floats would drift.
            self._microseconds += sign * round(self.segments[segment].seconds * 1e6)

    def _write(
        self, segment: str, action: str, text: str | None, text_verbatim: str | None
    ) -> Edit:
        audio = self.segments[segment].place
        row = (segment, "", time.time(), action, text, text_verbatim, audio)
        with opened(self.path) as connection:
            statement = "INSERT INTO edits VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)"
            number = connection.execute(statement, row).lastrowid
        return Edit(number or 0, segment, action, text, text_verbatim, audio)
