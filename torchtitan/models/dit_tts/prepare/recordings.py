"""One recording of a corpus as its reader lists it: what is said, by whom, and where the audio is.

Readers of every format (``formats/``) yield ``Item`` or, where a recording cannot be used,
``Unusable``; the pipeline decides whether that ends the run. The columns of a source, from a CSV's
row, a table's row or a JSON, become an item by ``make_item`` alone, so that all formats accept the
same names.
"""

import datetime
import hashlib
import json
import math
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

SPLITS = ("train", "heldout")

# The first of these that a row has is taken.
TEXT_NAMES = ("text", "normalized_text", "transcription", "transcript", "sentence")
SPEAKER_NAMES = ("speaker", "speaker_id", "speaker_name", "client_id")
LANGUAGE_NAMES = ("language", "lang", "locale")
KEY_NAMES = ("key", "id", "utt_id", "utterance_id")
MAX_DEPTH = 64  # of lists and objects in each other
_HELDOUT_PREFIXES = ("held", "dev", "val", "eval", "test")


class Unusable(NamedTuple):
    """A recording that cannot be used."""

    key: str
    sentence: str  # what is wrong, without the source's path
    recordings: int = 1  # how many it stands for


@dataclass(frozen=True)
class Item:
    """One recording.

    Attributes:
        key: unique within the output, no dot in it.
        split: "train" or "heldout".
        metadata: what goes into the sample's JSON, text and speaker included.
        audio: where the audio is, see ``load.load_audio``; paths relative to the source's folder.
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

    def content(self) -> bytes:
        """Everything that goes into the sample but the audio, in a fixed order, for a digest."""
        row = [self.key, self.text, self.speaker, self.split, self.metadata]
        return json.dumps(row, sort_keys=True).encode()


@dataclass(frozen=True)
class ItemRules:
    """How a row's columns become an item, where the command line has a say."""

    text_column: str = ""
    speaker_column: str = ""
    speaker: str = ""  # of rows without one
    language: str = ""  # of rows without one
    heldout_share: float = 0.0  # of rows without a split, by a hash of (heldout_seed, key)
    heldout_seed: int = 0


def make_item(
    row: Mapping[str, Any], key: str, audio: dict[str, Any], rules: ItemRules
) -> Item | Unusable:
    """An item out of a source's columns; every column goes into the metadata too."""
    try:
        metadata = {str(name): plain(value) for name, value in row.items() if value is not None}
        json.dumps(metadata, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Unusable(key, "has characters that utf-8 cannot encode (half a surrogate pair)")
    except RecursionError:
        return Unusable(key, f"has values nested more than {MAX_DEPTH} deep")
    if "file" in audio and not _is_path(audio["file"]):
        return Unusable(key, f"names the file {audio['file']!r}, which is no path")
    text_name, text = _first(metadata, rules.text_column, TEXT_NAMES)
    if not isinstance(text, str):
        wanted = rules.text_column or " or ".join(TEXT_NAMES)
        found = f'"{text_name}" = {text!r}' if text_name else f"the columns {sorted(metadata)}"
        return Unusable(key, f"has {found}, but a string is needed as {wanted}")
    speaker_name, speaker = _first(metadata, rules.speaker_column, SPEAKER_NAMES)
    if speaker is None or speaker == "":
        speaker = rules.speaker or None
    if isinstance(speaker, float) and speaker.is_integer():
        speaker = int(speaker)  # as a table has it where rows without one are among its numbers
    if isinstance(speaker, int) and not isinstance(speaker, bool):
        speaker = str(speaker)
    if not isinstance(speaker, str) or not speaker.strip():
        wanted = rules.speaker_column or " or ".join(SPEAKER_NAMES)
        found = f'"{speaker_name}" = {speaker!r}' if speaker is not None else "no speaker"
        return Unusable(
            key, f"has {found}; a name or number is needed as {wanted}, or --speaker NAME for all"
        )
    split = split_of(metadata.get("split"))
    if split is None and metadata.get("split") not in (None, ""):
        return Unusable(
            key,
            f'has "split" = {metadata["split"]!r}; allowed are names that begin with train, and with '
            f"{', '.join(_HELDOUT_PREFIXES)} for held-out ones",
        )
    if split is None:
        split = "heldout" if drawn(key, rules.heldout_seed) < rules.heldout_share else "train"
    language = _first(metadata, "", LANGUAGE_NAMES)[1] or rules.language
    metadata |= {"text": text, "speaker": speaker}
    if language:
        metadata["language"] = language
    return Item(key, text, speaker, split, metadata, audio)


def _is_path(name: str) -> bool:
    """Whether a file can have the name; bytes that are no utf-8 come as lone surrogates."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _first(row: Mapping[str, Any], given: str, names: tuple[str, ...]) -> tuple[str, Any]:
    """(name, value) of the given column, or of the first of `names` that is there; ("", None)."""
    for name in (given,) if given else names:
        if row.get(name) is not None:
            return name, row[name]
    return "", None


def split_of(value: Any) -> str | None:
    """The split that a source's name for one means; None where it says nothing known."""
    name = str(value or "").strip().lower()
    if name.startswith("train"):
        return "train"
    return "heldout" if name.startswith(_HELDOUT_PREFIXES) else None


def drawn(key: str, seed: int) -> float:
    """A number in [0, 1) that key and seed determine."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def sample_key(name: str) -> str:
    """A source's own name of a recording as a key of the archives.

    A key is a relative path without dots: what follows the first dot of a member's name is its
    kind, and readers differ in whether a folder's dot counts. So `./a/b.1` becomes `a/b_1`. What is
    not utf-8 is escaped.
    """
    cleaned = posixpath.normpath(name.replace("\0", "_")).lstrip("/")
    while cleaned.startswith("../"):
        cleaned = cleaned[3:]
    return cleaned.replace(".", "_").encode("utf-8", "backslashreplace").decode() or "_"


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A value as JSON can hold it: times as ISO 8601, what is not finite as null, bytes left out.

    Raises:
        RecursionError: nested deeper than `depth`.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (Mapping, list, tuple)) and depth == 0:
        raise RecursionError
    if isinstance(value, Mapping):
        return {str(name): plain(one, depth - 1) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one, depth - 1) for one in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return None
    return str(value)
