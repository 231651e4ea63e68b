"""Requests of `titan-tts generate`: one text from an option, a file or the standard input, or a list of texts, a
line of JSON each."""

import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_tts.speak.long_text import clean_text
from torchtitan.models.dit_tts.bounded import parse_json
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import file_name, fingerprint

STANDARD_INPUT = "-"
# About three hours of speech, which are held in memory. A book is a list of its chapters.
MAX_CHARACTERS = 200_000
MAX_SECONDS = 600.0


@dataclass(frozen=True)
class Request:
    """One text to say, in whose voice and how."""

    where: str
    """option, or file and line, for messages"""

    text: str
    name: str = ""
    """file name without suffix, in a list"""

    reference: tuple[str, ...] = ()
    """audio file, or .npy of latents (R, C); of several turns one of each speaker"""

    reference_text: str = ""
    speaker: str = ""
    seconds: float | None = None
    conditions: dict[str, str] = field(default_factory=dict)

    def fingerprint(self, settings: str) -> str:
        """Hash of all that changes the speech. `settings`: options of the command."""
        own = {name: value for name, value in vars(self).items() if name not in ("where", "name")}
        return fingerprint(settings, json.dumps(own, sort_keys=True))

    def path(self, folder: str, suffix: str) -> Path:
        """The sound file."""
        return Path(folder, f"{self.name}.{suffix}")

    def located(self, error: InputError) -> InputError:
        """The error with this request's file and line or option in front, where it names none."""
        sentence = str(error)
        if sentence.startswith((self.where, "--") if self.where.startswith("--") else self.where):
            return error
        return InputError(f"{self.where}: {sentence}")

    def check(self) -> None:
        """Raises InputError for mistakes that show without the model."""
        if not self.text:
            raise InputError(f"{self.where} is empty; give a text")
        if len(self.text) > MAX_CHARACTERS:
            raise InputError(
                f"{self.where} has {len(self.text)} characters, but at most {MAX_CHARACTERS} are allowed at "
                f"once; make a list of its chapters"
            )
        if self.reference and self.speaker:
            raise InputError(f"{self.where}: give either a reference or a speaker, not both")
        if missing := [path for path in self.reference if not os.path.isfile(path)]:
            raise InputError(f"{self.where}: reference = {missing[0]}, but there is no such file")
        if self.reference_text and not self.reference:
            raise InputError(f"{self.where}: reference text without a reference")
        if self.seconds is not None and not 0 < self.seconds <= MAX_SECONDS:
            option = "--seconds" if self.where.startswith("--") else f"{self.where}: seconds"
            raise InputError(
                f"{option} = {self.seconds:g}, but it must be above 0 and at most {MAX_SECONDS:g}"
            )


_KEYS: dict[str, Any] = {
    "text": str,
    "name": str,
    "reference": (str, list),
    "reference_text": str,
    "speaker": str,
    "seconds": (int, float),
    "conditions": dict,
}

MAX_TEXT_BYTES = 256 << 20
"""of a text file or a list"""


def read_text(path: str) -> str:
    """Reads a text file, or the standard input."""
    try:
        if path == STANDARD_INPUT:
            content = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1) if sys.stdin else b""
        else:
            with open(path, "rb") as file:  # a device may have no end
                content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise InputError(f"{path}: has more than {MAX_TEXT_BYTES >> 20} MiB; split it")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not utf-8 text") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def read_requests(path: str, common: Request) -> list[Request]:
    """Reads a list of JSON objects with the keys of _KEYS; references are relative to the list. `common`: defaults of the
    lines; one with a voice of its own takes nothing of the common voice."""
    root = Path(".") if path == STANDARD_INPUT else Path(path).parent
    requests = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            request = _request(f"{path} line {number}", line, root, common)
            request.check()
            requests.append(request)
    if not requests:
        raise InputError(f"{path}: is empty; give one JSON object per line")
    names = [file_name(each.name or f"{number:06d}") for number, each in enumerate(requests, 1)]
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:  # some filesystems do not tell capitals from small letters
            raise InputError(f"{path}: two lines have the name {name!r}; give each its own")
        seen.add(name.lower())
    return [replace(request, name=name) for request, name in zip(requests, names, strict=True)]


def _request(where: str, line: str, root: Path, common: Request) -> Request:
    try:
        given: Any = parse_json(line, half_pairs=True)
    except ValueError:
        given = None
    if not isinstance(given, dict) or "text" not in given:
        raise InputError(f'{where}: is {line[:100]!r}, but a JSON object with "text" is needed')
    for key, value in given.items():
        kind = _KEYS.get(key)
        if kind is None:
            raise InputError(f"{where}: has {key!r}, but allowed are {', '.join(_KEYS)}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{where}: {key} = {value!r} is of a wrong type")
    own_voice = "reference" in given or "speaker" in given
    voice = replace(common, reference=(), reference_text="", speaker="") if own_voice else common
    conditions = {k: v for k, v in common.conditions.items() if not (own_voice and k == "speaker")}
    seconds = given.get("seconds", common.seconds)
    reference = voice.reference
    if "reference" in given:
        paths = given["reference"]
        paths = [paths] if isinstance(paths, str) else paths
        if not all(isinstance(path, str) for path in paths):
            raise InputError(
                f"{where}: reference = {paths!r}, but it must be a path or a list of them"
            )
        reference = tuple(str(root / path) for path in paths if path)
    return Request(
        where=where,
        text=clean_text(given["text"]),
        name=given.get("name", ""),
        reference=reference,
        reference_text=given.get("reference_text", voice.reference_text),
        speaker=given.get("speaker", voice.speaker),
        seconds=None if seconds is None else float(min(seconds, 10**9)),
        conditions=conditions | {k: str(v) for k, v in given.get("conditions", {}).items()},
    )
