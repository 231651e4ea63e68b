"""The segments to annotate: of a collected folder or of a manifest; and the manifest with the annotations in it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_tts.annotate.store import MANIFEST_SUFFIX, annotations
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
