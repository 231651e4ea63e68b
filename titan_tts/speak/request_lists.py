"""Requests of `titan-tts generate`: one text from an option, a file or the standard input, or a list of texts, a
line of JSON each."""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_tts.speak.long_text import clean_text
from torchtitan.models.dit_tts.bounded import parse_json, read_bytes
from torchtitan.models.dit_tts.errors import InputError, reading, require
from torchtitan.models.dit_tts.files import file_name, fingerprint

STANDARD_INPUT = "-"
# About three hours of speech, which are held in memory. A book is a list of its chapters.
MAX_CHARACTERS = 200_000
MAX_SECONDS = 600.0


@dataclass(frozen=True)
class Request:
    """A text to say."""

    where: str
    """option, or file and line, for messages"""

    text: str = ""
    id: str = ""
    """name of its file without suffix, in a list"""

    speaker: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)
    """values of conditioning tokens"""

    reference: tuple[str, ...] = ()
    """recordings, or .npy of latents (R, C)"""

    reference_text: str = ""
    seconds: float | None = None
    caption: str = ""
    """the voice and its manner in words"""

    @property
    def names_voice(self) -> bool:
        """The default voice is not asked for: a speaker, a reference, a caption or a speaker's token is given."""
        given = self.speaker, self.reference, self.caption, "speaker" in self.conditions
        return any(given)

    def named(self, key: str) -> str:
        """A key of the request as the user gives it, for messages."""
        is_option = self.where.startswith("--")
        return f"--{key.replace('_', '-')}" if is_option else f"{self.where}: {key}"

    def fingerprint(self, settings: str) -> str:
        """Hash of all that changes the speech. `settings`: options of the command."""
        unsaid = ("where", "id", *(() if self.caption else ("caption",)))
        own = {name: value for name, value in vars(self).items() if name not in unsaid}
        return fingerprint(settings, json.dumps(own, sort_keys=True))

    def path(self, folder: str, suffix: str) -> Path:
        """The sound file."""
        return Path(folder, f"{self.id}.{suffix}")

    def located(self, error: InputError) -> InputError:
        """The error with this request's file and line in front."""
        is_named = self.where.startswith("--") or str(error).startswith(self.where)
        return error if is_named else InputError(f"{self.where}: {error}")

    def check(self) -> None:
        """Raises InputError for mistakes that show without the model."""
        count, files, where = len(self.text), self.reference, self.where
        require(count > 0, f"{where} is empty; give a text")
        require(
            count <= MAX_CHARACTERS,
            f"{where} has {count} characters, but at most {MAX_CHARACTERS} are allowed at once; make a list of its chapters",
        )
        reference, seconds = self.named("reference"), self.named("seconds")
        both = f"{reference} is given with the speaker {self.speaker}; give one of the two"
        require(not (files and self.speaker), both)
        missing = next((path for path in files if not os.path.isfile(path)), None)
        require(missing is None, f"{reference} = {missing}, but there is no such file")
        known = bool(files) or not self.reference_text
        require(known, f"{self.named('reference_text')} is given without a reference; give both")
        require(
            self.seconds is None or 0 < self.seconds <= MAX_SECONDS,
            f"{seconds} = {self.seconds}, but it must be above 0 and at most {MAX_SECONDS:g}",
        )


_KEYS: dict[str, Any] = {
    "text": str,
    "name": str,
    "reference": (str, list),
    "reference_text": str,
    "speaker": str,
    "caption": str,
    "seconds": (int, float),
    "conditions": dict,
}

MAX_TEXT_BYTES = 256 << 20
"""of a text file or a list"""


def read_text(path: str) -> str:
    """Reads a text file, or the standard input."""
    with reading(path, f"give utf-8 text of at most {MAX_TEXT_BYTES >> 20} MiB"):
        if path != STANDARD_INPUT:
            return read_bytes(path, MAX_TEXT_BYTES).decode("utf-8-sig")
        content = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        require(len(content) <= MAX_TEXT_BYTES, "the standard input is too long; split it")
        return content.decode("utf-8-sig")


def read_requests(path: str, common: Request) -> list[Request]:
    """Reads a list of JSON objects with the keys of _KEYS; references are relative to the list. `common`: defaults of the
    lines; one with a voice of its own takes nothing of the common voice."""
    root = Path(".") if path == STANDARD_INPUT else Path(path).parent
    requests = list[Request]()
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            request = _request(f"{path} line {number}", line, root, common)
            request.check()
            name = file_name(request.id or f"{len(requests) + 1:06d}")
            requests.append(replace(request, id=name))
    require(bool(requests), f"{path}: is empty; give one JSON object per line")
    # Some filesystems do not tell capitals from small letters.
    counts = Counter(each.id.lower() for each in requests)
    twice = [each.id for each in requests if counts[each.id.lower()] > 1]
    require(not twice, f"{path}: two lines have the name {twice[-1:]}; give each its own")
    return requests


def _request(where: str, line: str, root: Path, common: Request) -> Request:
    try:
        given: Any = parse_json(line, half_pairs=True)
    except ValueError:
        given = None
    if not isinstance(given, dict) or "text" not in given:
        raise InputError(f'{where}: is {line[:100]!r}, but a JSON object with "text" is needed')
    for key, value in given.items():
        require(key in _KEYS, f"{where}: has {key!r}, but allowed are {', '.join(_KEYS)}")
        is_right = isinstance(value, _KEYS[key]) and not isinstance(value, bool)
        require(is_right, f"{where}: {key} = {value!r} is of a wrong type")
    conditions, files = common.conditions, common.reference
    if "reference" in given or "speaker" in given:  # nothing of the common voice
        conditions = {name: value for name, value in conditions.items() if name != "speaker"}
        common, files = replace(common, speaker="", reference_text=""), ()
    if paths := given.get("reference"):
        paths = [paths] if isinstance(paths, str) else paths
        are_paths = all(isinstance(path, str) for path in paths)
        require(are_paths, f"{where}: reference = {paths!r}, but it must be paths")
        files = tuple(str(root / path) for path in paths)
    seconds = given.get("seconds", common.seconds)
    return Request(
        where,
        clean_text(given["text"]),
        given.get("name", ""),
        given.get("speaker", common.speaker),
        {**conditions, **{k: str(v) for k, v in given.get("conditions", {}).items()}},
        files,
        given.get("reference_text", common.reference_text),
        None if seconds is None else float(min(seconds, 10**9)),
        given.get("caption", common.caption),
    )
