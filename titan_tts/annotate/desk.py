"""The next segment to decide about: the recognizers' least agreement comes first, skipped segments last."""

import time
from collections import deque
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
        self._waiting = deque(each.id for each in order)

    def next(self) -> Segment | None:
        """The segment that was taken back, else the first of those that were skipped least."""
        with self._lock:
            return self.segments[self._waiting[0]] if self._waiting else None

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
                edits.append(self._write(segment, *now))
            if segment in self._waiting:
                self._waiting.remove(segment)
            if decision(edits) is None:
                self._waiting.append(segment)

    def undo(self) -> tuple[Segment, Edit]:
        """Takes back the last decision, whose segment comes next. Raises InputError where there is none."""
        with self._lock:
            last = max((edits[-1] for edits in self._edits.values() if edits), default=None)
            if last is None:
                raise InputError("there is nothing to undo")
            self._write(last.segment, "undo", None, None)
            self._edits[last.segment].pop()
            if last.segment in self._waiting:
                self._waiting.remove(last.segment)
            self._waiting.appendleft(last.segment)
            return self.segments[last.segment], last

    def progress(self) -> dict[str, Any]:
        """Counts and hours of what is decided, and of all."""
        with self._lock:
            found = {i: edit for i, edits in self._edits.items() if (edit := decision(edits))}
            return {
                "done": len(found),
                "rejected": sum(edit.action == "reject" for edit in found.values()),
                "all": len(self.segments),
                "hours_done": sum(self.segments[i].seconds for i in found) / 3600,
                "hours": sum(each.seconds for each in self.segments.values()) / 3600,
            }

    def _write(
        self, segment: str, action: str, text: str | None, text_verbatim: str | None
    ) -> Edit:
        audio = self.segments[segment].place
        row = (segment, "", time.time(), action, text, text_verbatim, audio)
        with opened(self.path) as connection:
            statement = "INSERT INTO edits VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)"
            number = connection.execute(statement, row).lastrowid
        return Edit(number or 0, segment, action, text, text_verbatim, audio)
