"""A list of recordings: CSV, TSV or JSONL with one row per recording, as NeMo and Hugging Face have.

Columns: the audio's path (`audio`, `audio_filepath`, `path` ...), relative to the manifest or
absolute; text, speaker, language, split and key by the names in `records.columns`; `offset` and `duration`
in seconds for a part of a file; `reference` for the sample's speaker reference: a recording, or in JSON a list of
them. All columns are kept in the sample's JSON.
"""

import csv
import os
from collections.abc import Iterator
from typing import Any

from titan_tts.prepare.formats.bars import has_bars
from titan_tts.prepare.settings import Options
from titan_tts.records.columns import (
    AUDIO_NAMES,
    KEY_NAMES,
    TEXT_NAMES,
    first_value,
    make_utterance,
    sample_key,
)
from titan_tts.records.json_lines import NOT_UTF8, is_utf8, text_lines
from titan_tts.records.utterance import Unusable, Utterance
from torchtitan.models.dit_tts.bounded import parse_json
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import nfc

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
_FOLDER_NAMES = ("manifest.jsonl", "manifest.csv", "manifest.tsv", "metadata.jsonl")
# Its line, and its columns or why there are none.
_Row = tuple[int, dict[str, Any] | str]


class Manifest:
    """Keys are the rows' own, or the audio's path without its suffix (and the part's offset)."""

    self_contained = False

    def __init__(self, options: Options):
        path = self._find(options.source)
        if path is None:
            raise InputError(
                f"{options.source}: is not a manifest; give a file that ends in {', '.join(SUFFIXES)}, "
                f"or a folder with one of {', '.join(_FOLDER_NAMES)}"
            )
        self.path = os.path.abspath(path)
        self.root, self.name = os.path.split(self.path)
        self.options = options

    @classmethod
    def recognizes(cls, source: str) -> bool:
        return cls._find(source) is not None

    @staticmethod
    def _find(source: str) -> str | None:
        if os.path.isfile(source):
            has_columns = not (source.endswith(".csv") and has_bars(source))
            return source if source.endswith(SUFFIXES) and has_columns else None
        paths = [os.path.join(source, name) for name in _FOLDER_NAMES]
        there = [path for path in paths if os.path.isfile(path)]
        return there[0] if len(there) == 1 else None

    def files(self) -> dict[str, str]:
        return {self.name: self.path}

    def items(self) -> Iterator[Utterance | Unusable]:
        is_table = self.name.endswith((".csv", ".tsv"))
        for line, row in self._table_rows() if is_table else self._json_rows():
            where = f"{self.name} line {line}"
            try:
                item = Unusable(where, row) if isinstance(row, str) else self._item(row)
            except ValueError as error:
                item = Unusable(where, str(error))
            yield item

    def _lines(self) -> Iterator[str]:
        return text_lines(self.path, newline="")

    def _json_rows(self) -> Iterator[_Row]:
        for number, line in enumerate(self._lines(), 1):
            require(
                line.strip() not in ("[", "{"),
                f"{self.path}: is JSON of several lines; write one object per line",
            )
            if line.strip():
                yield number, _json_row(line)

    def _table_rows(self) -> Iterator[_Row]:
        """A CSV has quotes as in RFC 4180; one that is not closed or not doubled is an error of the file, as
        nobody knows which rows are in it. In a TSV, as of Common Voice, a quote is a character of the text.
        """
        if self.name.endswith(".tsv"):
            reader = csv.reader(self._lines(), delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            line = next(self._lines(), "")
            # As spreadsheets write it where the comma is in numbers.
            separator = ";" if ";" in line and "," not in line else ","
            reader = csv.reader(
                self._lines(), delimiter=separator, strict=True, skipinitialspace=True
            )
        first = 1
        try:
            header = next(reader, [])
            names = ", ".join(AUDIO_NAMES)
            require(is_utf8("".join(header)), f"{self.path}: {NOT_UTF8}")
            require(
                bool(set(AUDIO_NAMES) & set(header)),
                f"{self.path}: its first line is {header}; a header with one of {names} is needed",
            )
            first = reader.line_num + 1
            for record in reader:
                if (
                    reader.line_num > first
                ):  # a stray quote takes the rows up to the next one into its text
                    sentence = "has a line break within quotes; check its quotes, or join the lines"
                    yield first, sentence
                elif record:
                    yield first, self._table_row(header, record)
                first = reader.line_num + 1
        except csv.Error as error:
            raise InputError(
                f"{self.path} line {first}: is not CSV ({error}); check its quotes"
            ) from None

    def _table_row(self, header: list[str], record: list[str]) -> dict[str, Any] | str:
        if not is_utf8("".join(record)):
            return NOT_UTF8
        if len(record) != len(header):
            return f"does not have the {len(header)} fields of the header"
        # pandas writes its index as a column without a name.
        named = {name: value for name, value in zip(header, record, strict=True) if name}
        row = {name: value for name, value in named.items() if value != ""}
        texts = (self.options.text_column,) if self.options.text_column else TEXT_NAMES
        if not any(name in row for name in texts):
            # An empty text, as in JSON, rather than a missing column.
            row |= {name: "" for name in texts if name in named}
        return row

    def _item(self, row: dict[str, Any]) -> Utterance | Unusable:
        path = first_value(row, AUDIO_NAMES)
        if not isinstance(path, str):
            raise ValueError(f"names no audio file as {' or '.join(AUDIO_NAMES)}")
        place: dict[str, Any] = {"file": path}
        if row.get("offset") not in (None, ""):
            place["offset"] = _seconds(row, "offset")
            place["seconds"] = _seconds(row, "duration") if row.get("duration") else None
        name = first_value(row, KEY_NAMES)
        if name is None:
            relative = os.path.relpath(os.path.join(self.root, path), self.root)
            name = os.path.splitext(path if relative.startswith("..") else relative)[0]
            if "offset" in place:  # several parts of one file
                name += f"-{round(place['offset'] * 1000):08d}"
        references = _references(row, path)
        return make_utterance(row, sample_key(str(name)), place, self.options, references)


def _json_row(line: str) -> dict[str, Any] | str:
    if not is_utf8(line):
        return NOT_UTF8
    try:
        row = parse_json(line)
    except ValueError as error:
        return f"is not a JSON object ({error}); a manifest has one per line"
    if not isinstance(row, dict):
        return f"is not a JSON object (but {str(row)[:20]!r}); a manifest has one per line"
    return row


def _references(row: dict[str, Any], audio: str) -> list[str]:
    """Paths of the recordings that are joined to the sample's reference; empty where the row names none."""
    given = row.get("reference")
    paths = [given] if isinstance(given, str) else given or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f'has "reference" = {given!r}; a path is needed, or a list of paths')
    if nfc(audio) in map(nfc, paths):
        raise ValueError(f"names {audio} as its own reference; name another recording")
    return [path for path in paths if path]


def _seconds(row: dict[str, Any], name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f'has "{name}" = {row[name]!r}; a number of seconds is needed')
    return value
