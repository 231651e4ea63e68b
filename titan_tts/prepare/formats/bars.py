"""Lists with bars between the fields, as LJSpeech, F5-TTS, Piper, Matcha-TTS and GPT-SoVITS have them.

    audio_file|text          a first line with the names of columns, one of them the audio's: F5-TTS
    path|text                F5-TTS, Piper, Matcha-TTS
    path|speaker|text        Piper, Matcha-TTS
    id|text|normalized text  LJSpeech
    path|speaker|language|text    GPT-SoVITS

A path is absolute, or relative to the list, to its wavs/ or wav/, or to a folder above it, from which the project's own
tools are started; `.wav` may be left out. A quote is a letter of the text, unless a field is quoted as Python's csv does
it: because it has quotes, which are doubled, or bars.
"""

import os
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from titan_tts.prepare.formats import AUDIO_SUFFIXES
from titan_tts.prepare.settings import Options
from titan_tts.records.columns import (
    AUDIO_NAMES,
    KEY_NAMES,
    first_value,
    make_utterance,
    sample_key,
)
from titan_tts.records.json_lines import NOT_UTF8, is_utf8, text_lines
from titan_tts.records.utterance import Unusable, Utterance
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.files import path_on_disk

_LIST_SUFFIXES = (".csv", ".txt", ".list")
_LIST_NAME, _OWN_FOLDERS = "metadata.csv", ("", "wavs", "wav")
_FIELD = re.compile(r'(?:^|\|)(?:"((?:[^"]|"")*)"(?=\||$)|([^|]*))')
_COLUMNS = {2: ["audio", "text"], 4: ["audio", "speaker", "language", "text"]}
_OF_LJSPEECH = ["audio", "original_text", "text"]
_OF_SPEAKERS = ["audio", "speaker", "text"]
_JUDGED = 5000  # rows by which the columns of a list without names are told
_SEVERAL = 1.5  # texts of a speaker on the average; of a text and its normalized form it is one
_LEVELS = 4  # folders above the list


class Bars:
    """Keys are ids, or paths without their suffix. One speaker, "LJSpeech", of a folder's list without speakers, unless
    --speaker or --speaker-pattern is given."""

    self_contained = False

    def __init__(self, options: Options):
        source = os.path.abspath(options.source)
        self.path = os.path.join(source, _LIST_NAME) if os.path.isdir(source) else source
        require(
            self.recognizes(source),
            f"{source}: has no {_LIST_NAME}, or is not a list, with bars between path and text",
        )
        self.folder, self.name = os.path.split(self.path)
        numbered = self._rows()
        _, first = next(numbered)
        self.header = [name.strip().lower() for name in first]
        self.has_names = any(name in self.header for name in (*AUDIO_NAMES, *KEY_NAMES))
        judged = [row for _, row in islice(numbered, _JUDGED)]
        if not self.has_names:
            judged.insert(0, first)
            self.header = self._columns(judged)
        self._places = [(name, suffix) for name in _OWN_FOLDERS for suffix in ("", ".wav")]
        self.root = self._root(judged)
        named = options.speaker or options.speaker_pattern or self.path == source
        self.options = options if named else replace(options, speaker="LJSpeech")

    @classmethod
    def recognizes(cls, source: str) -> bool:
        path = os.path.join(source, _LIST_NAME) if os.path.isdir(source) else source
        return path.endswith(_LIST_SUFFIXES) and has_bars(path)

    def files(self) -> dict[str, str]:
        return {self.name: self.path}

    def items(self) -> Iterator[Utterance | Unusable]:
        rows = self._rows()
        for number, fields in islice(rows, 1, None) if self.has_names else rows:
            yield self._item(f"{self.name} line {number}", fields)

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        for number, line in enumerate(text_lines(self.path), 1):
            if line := line.rstrip("\r\n"):
                yield number, _fields(line)

    def _columns(self, rows: list[list[str]]) -> list[str]:
        """The columns of a list that does not name them."""
        three = [row for row in rows if len(row) == 3]
        if 2 * len(three) < len(rows):
            usual = max(_COLUMNS, key=lambda count: sum(len(row) == count for row in rows))
            return _COLUMNS[usual]
        pairs = {(second, third) for _, second, third in three if third}
        of_second, of_third = (
            (len(pairs) / max(1, len(set(each))) for each in zip(*pairs)) if pairs else (1, 1)
        )
        require(
            of_third < _SEVERAL or of_third < of_second,
            f"{self.path}: its third column repeats, as speakers do, but should be a text; give a first line with the "
            f"names of the columns, such as audio|text|speaker",
        )
        has_suffix = three[0][0].lower().endswith(AUDIO_SUFFIXES)
        return _OF_SPEAKERS if has_suffix or of_second >= _SEVERAL else _OF_LJSPEECH

    def _root(self, rows: list[list[str]]) -> str:
        """The list's folder, or the one above it to which paths are relative."""
        if self.path.endswith(os.path.join(os.sep, _LIST_NAME)):
            return self.folder
        root = self.folder
        for _ in range(_LEVELS):
            for row in rows[:3]:
                path = first_value(dict(zip(self.header, row)), (*AUDIO_NAMES, *KEY_NAMES))
                if path and self._find(root, path.strip()):
                    return root
            root = os.path.dirname(root)
        return self.folder

    def _find(self, root: str, name: str) -> str | None:
        """The path of a recording that is there, relative to the root."""
        for place in self._places:
            path = path_on_disk(root, os.path.join(place[0], name + place[1]))
            if os.path.isfile(os.path.join(root, path)):
                self._places.sort(key=lambda each: each != place)  # the others lie there as well
                return path
        return None

    def _item(self, where: str, fields: list[str]) -> Utterance | Unusable:
        if not is_utf8("".join(fields)):
            return Unusable(where, NOT_UTF8)
        if self.header is _OF_LJSPEECH and len(fields) == 2:
            fields = [*fields, ""]
        if len(fields) != len(self.header):
            needed = f"{len(self.header)} are needed: {'|'.join(self.header)}"
            return Unusable(where, f"has {len(fields)} fields between bars; {needed}")
        row = {name: value.strip() for name, value in zip(self.header, fields) if name}
        if self.header is _OF_LJSPEECH:
            row["text"] = row["text"] or row["original_text"]
        given = first_value(row, (*AUDIO_NAMES, *KEY_NAMES))
        if given is None:
            return Unusable(where, f"names no audio file as {self.header[0]}")
        is_name = not given.lower().endswith(AUDIO_SUFFIXES)
        # One that is missing is named as the list's project would have it.
        missing = os.path.join(self._places[0][0], f"{given}.wav") if is_name else given
        path = self._find(self.root, given) or missing
        relative = os.path.relpath(os.path.join(self.root, path), self.root)
        key = given if is_name else os.path.splitext(path if relative[:2] == ".." else relative)[0]
        if not self.has_names:
            del row["audio"]
        return make_utterance(row, sample_key(key), {"file": path}, self.options)


def has_bars(path: str) -> bool:
    """True if the first line of a file has bars. Raises InputError for UTF-16, as Notepad's "Unicode"."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(1 << 16).lstrip()
    require(not start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)), f"{path}: {NOT_UTF8}")
    return b"|" in start.partition(b"\n")[0] and b"\0" not in start


def _fields(line: str) -> list[str]:
    fields = []
    for match in _FIELD.finditer(line):
        quoted = match[1]
        if quoted is not None and ('""' in quoted or "|" in quoted):
            fields.append(quoted.replace('""', '"'))
        else:
            fields.append(match[0].removeprefix("|"))
    return fields
