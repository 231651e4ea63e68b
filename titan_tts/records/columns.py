"""The columns of a source -> an `Utterance`. All formats accept the same names of columns."""

import datetime
import hashlib
import json
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_tts.records.utterance import Reference, Unusable, Utterance, reference_text
from torchtitan.models.dit_tts.data.heldout import HELDOUT_PREFIXES, split_of
from torchtitan.models.dit_tts.files import nfc

# The first of these that a row has is taken.
AUDIO_NAMES = (
    *("audio", "audio_file", "audio_filepath", "audio_path"),
    *("path", "file", "file_name", "filename"),
)
TEXT_NAMES = ("text", "normalized_text", "transcription", "transcript", "sentence")
SPEAKER_NAMES = ("speaker", "speaker_id", "speaker_name", "client_id")
LANGUAGE_NAMES = ("language", "lang", "locale")
KEY_NAMES = ("key", "id", "utt_id", "utterance_id")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The meaning of a source's columns, and defaults for rows that lack one."""

    text_column: str = ""
    """Column of the text, if its name is not text or another usual one."""

    speaker_column: str = ""
    """Column of the speaker, if its name is not speaker or another usual one."""

    speaker_pattern: str = ""
    """Regular expression whose group finds the speaker in a recording's key, if no column has it."""

    speaker: str = ""
    """Speaker of recordings that have none."""

    language: str = ""
    """Language code of recordings that have none."""

    seed: int = 0
    """Seed of the references and of --heldout-fraction."""

    heldout_fraction: float = 0.0
    """Fraction of the recordings without a split, or of their speakers, to hold out; 1: a corpus for tests only."""

    heldout_by: Literal["utterance", "speaker"] = "utterance"
    """The unit that --heldout-fraction draws: single recordings, or speakers with all their recordings."""


def make_utterance(
    row: Mapping[str, Any],
    id: str,
    audio: dict[str, Any],
    columns: Columns,
    references: Sequence[str] = (),
) -> Utterance | Unusable:
    """An utterance out of a source's columns; every column goes into the labels as well."""
    try:
        labels = {str(name): plain(value) for name, value in row.items() if value is not None}
        json.dumps(labels, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Unusable(id, "has characters that utf-8 cannot encode (half a surrogate pair)")
    text_name, text = _first(labels, columns.text_column, TEXT_NAMES)
    wanted = columns.text_column or " or ".join(TEXT_NAMES)
    if not text_name:
        there = f"has the columns {', '.join(sorted(labels))}"
        needed = f"but the text is needed as {wanted}: name its column with --text-column"
        return Unusable(id, f"{there}, {needed}")
    if not isinstance(text, str):
        return Unusable(id, f'has "{text_name}" = {text!r}, but a string is needed')
    speaker_name, speaker = _first(labels, columns.speaker_column, SPEAKER_NAMES)
    if speaker is None or speaker == "":
        speaker = speaker_in(id, nfc(columns.speaker_pattern)) or nfc(columns.speaker) or None
    if isinstance(speaker, float) and speaker.is_integer():
        speaker = int(speaker)  # a table whose numbers have gaps has floats
    if isinstance(speaker, int) and not isinstance(speaker, bool):
        speaker = str(speaker)
    if not isinstance(speaker, str) or not speaker.strip():
        wanted = columns.speaker_column or " or ".join(SPEAKER_NAMES)
        given = f'"{speaker_name}" = {speaker!r}' if speaker is not None else "no speaker"
        if speaker is None and columns.speaker_pattern:
            given += f" and --speaker-pattern = {columns.speaker_pattern!r} finds none in its key"
        other = "or --speaker-pattern REGEX to find it in the key, or --speaker NAME for all"
        return Unusable(id, f"has {given}; a name or number is needed as {wanted}, {other}")
    split = split_of(labels.get("split"))
    if split is None and labels.get("split") not in (None, ""):
        allowed = f"train, or with {', '.join(HELDOUT_PREFIXES)} for held-out ones"
        return Unusable(
            id, f'has "split" = {labels["split"]!r}; allowed are names that begin with {allowed}'
        )
    if split is None:
        unit = speaker if columns.heldout_by == "speaker" else id
        split = "heldout" if drawn(unit, columns.seed) < columns.heldout_fraction else "train"
    language = _first(labels, "", LANGUAGE_NAMES)[1] or columns.language
    labels |= {"text": text, "speaker": speaker}
    if language:
        labels["language"] = language
    reference = Reference(tuple(references), reference_text(labels)) if references else None
    return Utterance(id, text, speaker, labels, audio, reference, split)


def _first(row: Mapping[str, Any], given: str, names: tuple[str, ...]) -> tuple[str, Any]:
    """(name, value) of the given column, or of the first of `names` that the row has; ("", None)."""
    for name in (given,) if given else names:
        if row.get(name) is not None:
            return name, row[name]
    return "", None


def first_value(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first value under `names` that is not empty, or None."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def speaker_in(key: str, pattern: str) -> str:
    """The match in a key of a pattern's first group; "" if none."""
    match = re.search(pattern, key) if pattern else None
    return match[1] or "" if match else ""


def drawn(name: str, seed: int) -> float:
    """A number in [0, 1) that name and seed determine."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def sample_key(name: str) -> str:
    """A source's own name of a recording as a key of the shards.

    A key is a relative path without dots, as readers take a member's kind from its first dot, or from
    its file name's: `./a/b.1` becomes `a/b_1`. Bytes that are no UTF-8 are escaped.
    """
    cleaned = posixpath.normpath(nfc(name).replace("\0", "_")).lstrip("/")
    while cleaned.startswith("../"):
        cleaned = cleaned[3:]
    return cleaned.replace(".", "_").encode("utf-8", "backslashreplace").decode() or "_"


def plain(value: Any) -> Any:
    """A value as JSON can hold it: texts in NFC, times as ISO 8601; null for infinities, NaN and bytes."""
    if isinstance(value, str):
        return nfc(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(element) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return None
    return str(value)
