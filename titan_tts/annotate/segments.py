"""The segments to annotate, of a collected folder or of a manifest; which comes next, the recognizers' least agreement first
and skipped ones last; and the manifest with the annotations in it."""

import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from titan_tts.annotate.store import (
    MANIFEST_SUFFIX,
    Edit,
    annotations,
    create,
    decision,
    opened,
    read_edits,
)
from titan_tts.collect.collection import COLLECTION_NAME, known_speakers, write_collection
from titan_tts.collect.folder import FILES, RECORD_NAME, is_complete, read_record
from titan_tts.prepare.audio_reader import Loader, Recording
from titan_tts.prepare.formats.manifest import Manifest
from titan_tts.prepare.settings import Options
from titan_tts.records.json_lines import json_object, text_lines
from titan_tts.records.utterance import Unusable, Utterance
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import atomic_file


@dataclass(frozen=True)
class Segment(Utterance):
    """An utterance of a list; `line`: its row as the file has it, with its end."""

    line: str = ""

    @property
    def text_verbatim(self) -> str | None:
        """None where there is only one transcript."""
        text = self.labels.get("text_verbatim")
        return None if text is None else str(text)

    @property
    def place(self) -> str:
        """The place of the audio: its file, and which part of it."""
        parts = ("file", "offset", "seconds")
        return json.dumps({name: self.audio[name] for name in parts if name in self.audio})

    @property
    def agreement(self) -> float:
        """Between the recognizers, 0 to 1; 1 where the row does not say."""
        return self._number("agreement", 1.0)

    @property
    def seconds(self) -> float:
        """0 where the row does not say."""
        length = self._number("stop", 0.0) - self._number("start", 0.0)
        return self._number("duration", length)

    def _number(self, name: str, otherwise: float) -> float:
        value: Any = self.labels.get(name)
        return float(value) if type(value) in (int, float) and abs(value) < 1e9 else otherwise


def read_segments(target: Path) -> dict[str, Segment]:
    """{id: segment} of a .jsonl manifest, or of the recordings that a collected folder's collect.json names, in the
    files' order."""
    lists, speakers = {target: ""}, {}
    if target.suffix != MANIFEST_SUFFIX or not target.is_file():
        names = read_record(target)["files"] if (target / RECORD_NAME).exists() else {}
        files = [file for file in sorted(names) if is_complete(target, file)]
        lists = {target / FILES / file / "segments.jsonl": names[file] for file in files}
        speakers = {name: f"s{number:04d}" for name, number in known_speakers(target).items()}
    require(
        bool(lists),
        f"{target} has no segments; give a folder that `titan-tts collect` wrote, or a .jsonl file with audio and text",
    )
    found: dict[str, Segment] = {}
    for path, source in lists.items():
        for segment in _read(path):
            if source:
                facts = {"source": source, "speaker": speakers.get(segment.id, "")}
                segment = replace(segment, labels=segment.labels | facts)
            unknown = segment.id not in found
            require(unknown, f"{path}: two rows have the id {segment.id!r}; give each its own")
            found[segment.id] = segment
    return found


def _read(path: Path) -> Iterator[Segment]:
    """The rows by the rules of `titan-tts prepare`: the same names of columns, the same ids."""
    # A row without a speaker can be annotated as well.
    manifest = Manifest(Options(source=str(path), output="", speaker="unknown"))
    lines = [line for line in text_lines(str(path), newline="") if line.strip()]
    for line, item in zip(lines, manifest.items(), strict=True):
        if isinstance(item, Unusable):
            raise InputError(f"{path}: {item.id} {item.sentence}; correct or remove the row")
        yield Segment(**vars(item), line=line)


def load_audio(target: Path, segment: Segment) -> Recording:
    """A segment's samples. Paths are relative to the collected folder, or to the manifest's."""
    root = target.parent if target.suffix == MANIFEST_SUFFIX else target
    try:
        found = Loader(str(root)).load(segment.audio, 0)
    except InputError as error:
        raise InputError(f"{target}: {segment.id}: {error}") from error
    assert isinstance(found, Recording)
    return found


def write_annotated(target: Path) -> Path:
    """A collected folder's collection.jsonl, or a manifest's NAME.annotated.jsonl: without rejected rows, annotated ones
    with their texts; a manifest's others byte for byte."""
    if target.suffix != MANIFEST_SUFFIX:
        write_collection(target)
        return target / COLLECTION_NAME
    segments, out = read_segments(target), target.with_suffix(".annotated.jsonl")
    edits = annotations(target, {i: each.place for i, each in segments.items()})
    with atomic_file(out) as file:
        for segment in segments.values():
            edit = edits.get(segment.id, {})
            if edit is None:
                continue
            line = segment.line
            if edit:
                row = (json_object(line) or {}) | edit
                line = json.dumps(row, ensure_ascii=False) + line[len(line.rstrip("\r\n")) :]
            file.write(line.encode())
    return out


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
