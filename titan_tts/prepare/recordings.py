"""One recording of a corpus as its reader lists it: its text, its speaker, and where the audio is.

Readers of every format (`formats/`) yield `Item` or, where a recording cannot be used, `Unusable`;
the pipeline decides whether that ends the run. `make_item` alone turns a source's columns (a row of a
CSV or a table, a JSON) into an item, so that all formats accept the same names.
"""

import datetime
import errno
import hashlib
import json
import math
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_tts.prepare.settings import Options
from torchtitan.models.dit_tts.bounded import parse_json
from torchtitan.models.dit_tts.data.heldout import HELDOUT_PREFIXES, split_of
from torchtitan.models.dit_tts.errors import InputError, show
from torchtitan.models.dit_tts.files import nfc

SPLITS = ("train", "heldout")

# The first of these that a row has is taken.
AUDIO_NAMES = (
    *("audio", "audio_file", "audio_filepath", "audio_path", "path", "file", "file_name"),
    "filename",
)
TEXT_NAMES = ("text", "normalized_text", "transcription", "transcript", "sentence")
SPEAKER_NAMES = ("speaker", "speaker_id", "speaker_name", "client_id")
LANGUAGE_NAMES = ("language", "lang", "locale")
KEY_NAMES = ("key", "id", "utt_id", "utterance_id")

NOT_UTF8 = "is not UTF-8; save it as UTF-8"
NO_TEXT = "but the text is needed as"

# Errors of a path, not of the disk that it is on.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def say_unlisted(error: OSError) -> None:
    """For `os.walk`, which else leaves a folder out without a word."""
    show(f"{error.filename}: cannot be listed ({error.strerror}), so what it holds is left out")


class SourceError(InputError):
    """A disk or store fails: the recording may be valid, so it is never left out as a corrupt one."""


def unreadable(path: str, error: OSError | ValueError) -> InputError:
    """The error of an audio file: a `SourceError` unless the path itself is wrong."""
    reason = getattr(error, "strerror", None) or error
    sentence = f"the audio file {path!r} cannot be read ({reason})"
    if "\\" in path:
        sentence += (
            "; it has backslashes, as on Windows: write paths with / and relative to the list"
        )
    if isinstance(error, OSError) and error.errno not in _NO_FILE:
        return SourceError(f"{sentence}; check the disk and its rights and start again")
    return InputError(sentence)


def is_utf8(text: str) -> bool:
    """True if a text that was read with errors="surrogateescape" was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a text; None for anything else."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Unusable(NamedTuple):
    """A recording that cannot be used."""

    key: str
    sentence: str  # why, without the source's path
    recordings: int = 1  # number of recordings that it stands for


@dataclass(frozen=True)
class Item:
    """One recording.

    Attributes:
        key: unique within the output, no dot in it.
        split: "train" or "heldout".
        metadata: the sample's JSON, text and speaker included.
        audio: where the audio is, see `audio_reader`; paths relative to the source's folder.
    """

    key: str
    text: str
    speaker: str
    split: str
    metadata: dict[str, Any]
    audio: dict[str, Any]

    def to_json(self) -> str:
        row = [self.key, self.text, self.speaker, self.split, self.metadata, self.audio]
        return json.dumps(row)

    @classmethod
    def from_json(cls, line: str | bytes) -> "Item":
        return cls(*json.loads(line))


def make_item(
    row: Mapping[str, Any], key: str, audio: dict[str, Any], options: Options
) -> Item | Unusable:
    """An item out of a source's columns; every column goes into the metadata too."""
    try:
        metadata = {str(name): plain(value) for name, value in row.items() if value is not None}
        json.dumps(metadata, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Unusable(key, "has characters that utf-8 cannot encode (half a surrogate pair)")
    text_name, text = _first(metadata, options.text_column, TEXT_NAMES)
    wanted = options.text_column or " or ".join(TEXT_NAMES)
    if not text_name:
        return Unusable(key, f"has the columns {', '.join(sorted(metadata))}, {NO_TEXT} {wanted}")
    if not isinstance(text, str):
        return Unusable(key, f'has "{text_name}" = {text!r}, but a string is needed')
    speaker_name, speaker = _first(metadata, options.speaker_column, SPEAKER_NAMES)
    if speaker is None or speaker == "":
        speaker = speaker_in(key, nfc(options.speaker_pattern)) or nfc(options.speaker) or None
    if isinstance(speaker, float) and speaker.is_integer():
        speaker = int(speaker)  # a table whose numbers have gaps has floats
    if isinstance(speaker, int) and not isinstance(speaker, bool):
        speaker = str(speaker)
    if not isinstance(speaker, str) or not speaker.strip():
        wanted = options.speaker_column or " or ".join(SPEAKER_NAMES)
        given = f'"{speaker_name}" = {speaker!r}' if speaker is not None else "no speaker"
        if speaker is None and options.speaker_pattern:
            given += f" and --speaker-pattern = {options.speaker_pattern!r} finds none in its key"
        return Unusable(
            key,
            f"has {given}; a name or number is needed as {wanted}, or --speaker-pattern REGEX to find "
            "it in the key, or --speaker NAME for all",
        )
    split = split_of(metadata.get("split"))
    if split is None and metadata.get("split") not in (None, ""):
        return Unusable(
            key,
            f'has "split" = {metadata["split"]!r}; allowed are names that begin with train, and with '
            f"{', '.join(HELDOUT_PREFIXES)} for held-out ones",
        )
    if split is None:
        unit = speaker if options.heldout_by == "speaker" else key
        split = "heldout" if drawn(unit, options.seed) < options.heldout_fraction else "train"
    language = _first(metadata, "", LANGUAGE_NAMES)[1] or options.language
    metadata |= {"text": text, "speaker": speaker}
    if language:
        metadata["language"] = language
    return Item(key, text, speaker, split, metadata, audio)


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
    """The match in a key of a pattern's group "speaker", else of its first group; "" if none."""
    match = re.search(pattern, key) if pattern else None
    if match is None:
        return ""
    return (match["speaker"] if "speaker" in match.re.groupindex else match[1]) or ""


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
