"""A collected folder, and the folder of one recording in it.

    OUTPUT/
      collect.json             settings, and {FILE_ID: name in SOURCE} of what it was made from
      speakers.json            {SEGMENT_ID: number of its speaker}, by which speakers keep their names
      sources.jsonl            which path has which content
      files/FILE_ID/           of one recording, renamed into place when it is complete
        recording.json         {"seconds"}
        segments.jsonl         a line per segment, in order of time
        embeddings.npy         (segments, E) float32, in the order of the lines
        SEGMENT_ID.flac        mono, at the recording's rate
      partial/                 what workers are making

FILE_ID is the first 16 hex digits of the SHA-256 of the recording's bytes, and a SEGMENT_ID is FILE_ID-START-STOP in
milliseconds. What lies in files/ depends on content and settings alone, so `source` and `speaker`, which depend on
other files, are empty there and stand in collection.jsonl.
"""

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_tts.jobs.workspace import require_same
from titan_tts.records.json_lines import as_lines
from torchtitan.models.dit_tts.bounded import (
    check_regular,
    parse_array,
    parse_json,
    read_bytes,
    read_json,
    read_json_file,
)
from torchtitan.models.dit_tts.errors import InputError, first_line, reading, require
from torchtitan.models.dit_tts.files import sync_folder, sync_tree, write_atomic

if TYPE_CHECKING:
    from titan_tts.collect.analyze import Segment

FORMAT = 1
RECORD_NAME = "collect.json"
FILES, PARTIAL = "files", "partial"
AGAIN = "move it away and run titan-tts collect again, which makes it of the recording"
MAX_SECONDS = 99_999.999  # the 8 digits of an id: 27.7 hours
_DIGITS = {"start": 3, "stop": 3, "agreement": 4, "snr_db": 2, "clipped": 6, "loudness": 2}
_DIGITS |= {"chars_per_second": 2}
_FIELDS = (*_DIGITS, "text", "text_verbatim", "language", "quality")  # of a segment
_MEASURED = ("pitch", "pitch_range", "bandwidth")  # folders of earlier versions lack them
_NULLABLE = ("agreement", "text_verbatim", *_MEASURED)
_NUMBERS = {*_DIGITS, *_MEASURED}
# They decide nothing in files/; the second one was a setting of earlier versions.
_FREE = {"speaker_threshold": None, "batch_size": None}


def open_folder(output: Path, settings: dict[str, Any]) -> None:
    """Makes collect.json in an empty folder. Other settings are refused once there are segments."""
    if not (output / RECORD_NAME).exists():
        foreign = [each.name for each in output.iterdir() if not each.name.startswith(".")]
        require(
            not foreign, f"{output}: holds {foreign[:1]} and no {RECORD_NAME}; give a new folder"
        )
        _write_record(output, {"format": FORMAT, "settings": settings, "files": {}})
    record = read_record(output)
    if any((output / FILES).glob("*")):
        old, new = record["settings"] | _FREE, settings | _FREE
        require_same(output, old, new, "give those again, or another OUTPUT")
    _write_record(output, record | {"settings": settings})


def read_record(output: Path) -> dict[str, Any]:
    path = output / RECORD_NAME
    record = read_json(path, settings=dict, files=dict)
    # They become names of folders, and the folder may be a stranger's.
    require(
        record.get("format") == FORMAT
        and all(re.fullmatch("[0-9a-f]{16}", file) for file in record["files"])
        and all(isinstance(name, str) for name in record["files"].values())
        and _is_number(record["settings"].get("speaker_threshold")),
        f"{path}: was written by another version of titan-tts collect; give a folder that this one wrote, or a new one",
    )
    return record


def write_names(output: Path, names: Mapping[str, str]) -> None:
    """Notes which files the collection is made of: {FILE_ID: name in SOURCE}."""
    _write_record(output, read_record(output) | {"files": dict(sorted(names.items()))})


def _write_record(output: Path, record: Mapping[str, Any]) -> None:
    write_atomic(output / RECORD_NAME, json.dumps(record, indent=1, ensure_ascii=False))


def is_complete(output: Path, file: str) -> bool:
    return (output / FILES / file).is_dir()


def segment_id(file: str, start: float, stop: float) -> str:
    """The id of the segment between two times in seconds."""
    return f"{file}-{round(start * 1000):08d}-{round(stop * 1000):08d}"


def _audio(file: str, name: str) -> str:
    return f"{FILES}/{file}/{name}.flac"


def write_recording(
    output: Path,
    file: str,
    folder: Path,
    segments: "Sequence[Segment]",
    seconds: float,
    rate: int,
) -> None:
    """Makes files/FILE_ID of a recording's segments, whose audio has `rate`: in `folder` first, which is then renamed.
    Of two writers the first one wins: both write the same. Raises OSError where the disk fails."""
    import soundfile

    from titan_tts.prepare.captions import voice_figures  # it imports torch

    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for segment in segments:
        name = segment_id(file, segment.start, segment.stop)
        facts: dict[str, Any] = {
            "id": name,
            "audio": _audio(file, name),
            "source": "",
            "speaker": "",
        }
        for field in _FIELDS:
            value = getattr(segment, field)
            is_rounded = field in _DIGITS and value is not None
            facts[field] = round(value, _DIGITS[field]) if is_rounded else value
        facts |= voice_figures(segment.waveform, rate)
        records.append(facts)
        flac = io.BytesIO()  # soundfile does not say that a disk is full, or not by an OSError
        soundfile.write(flac, segment.waveform, rate, "PCM_16", format="FLAC")
        (folder / f"{name}.flac").write_bytes(flac.getvalue())
    (folder / "segments.jsonl").write_text(as_lines(records), encoding="utf-8")
    vectors = [segment.embedding for segment in segments] or np.zeros((0, 0))
    np.save(folder / "embeddings.npy", np.asarray(vectors, np.float32))
    (folder / "recording.json").write_text(json.dumps({"seconds": seconds}))
    sync_tree(folder)
    target = output / FILES / file
    target.parent.mkdir(exist_ok=True)
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    sync_folder(target.parent)


def read_recording(folder: Path, file: str) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The records and embeddings of a recording's folder. Raises InputError where something cannot be read, or where a
    record's id, times and audio do not agree: a text must never come to stand with another segment's audio."""
    try:
        return _checked(folder, file)
    except Exception as error:  # each library has its own
        what = error if isinstance(error, InputError) else f"is damaged ({first_line(error)})"
        raise InputError(f"{folder}: {what}; {AGAIN}") from error


def _checked(folder: Path, file: str) -> tuple[list[dict[str, Any]], np.ndarray]:
    import soundfile

    # Not splitlines(): a text may hold other characters that end a line, such as U+2028.
    lines = str(read_bytes(folder / "segments.jsonl"), "utf-8").split("\n")[:-1]
    records = [parse_json(line) for line in lines]
    embeddings = parse_array(read_bytes(folder / "embeddings.npy"))
    is_table = embeddings.ndim == 2 and embeddings.dtype.kind == "f"
    require(is_table and bool(np.isfinite(embeddings).all()), "has embeddings that are none")
    seconds = min(read_seconds(folder) + 0.001, MAX_SECONDS)
    require(
        len(embeddings) == len(records) == len(list(folder.glob("*.flac"))),
        f"has {len(records)} records and other numbers of audio files or embeddings",
    )
    last = 0.0
    for record in records:
        for field in (*_FIELDS, *_MEASURED):
            value = record.setdefault(field) if field in _MEASURED else record[field]
            kind = _is_number(value) if field in _NUMBERS else isinstance(value, str)
            kind = kind or value is None and field in _NULLABLE
            require(kind, f"a record has {field} = {value!r}")
        start, stop = record["start"], record["stop"]
        name, given = segment_id(file, start, stop), (record["id"], record["audio"])
        require(given == (name, _audio(file, name)), f"{given} has the times of {name}")
        check_regular(folder / f"{name}.flac")
        length = soundfile.info(folder / f"{name}.flac").duration
        # As times rise, no id is there twice.
        require(
            last <= start < stop <= seconds and abs(length - (stop - start)) < 0.0015,
            f"{name} overlaps another segment, ends after the recording or has {length:.3f} s of audio",
        )
        last = stop
    return records, embeddings


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def read_seconds(folder: Path) -> float:
    """Length of the whole recording."""
    with reading(folder / "recording.json", "collect the recording again"):
        return float(read_json_file(folder / "recording.json")["seconds"])
