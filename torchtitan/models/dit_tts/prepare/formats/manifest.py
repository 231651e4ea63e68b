"""A list of recordings: CSV, TSV or JSONL, one a row, as NeMo's and Hugging Face's manifests are.

Columns: the audio's path (`audio`, `audio_filepath`, `path` ...), relative to the manifest or
absolute; text, speaker, language, split and key by the names in ``items``; `offset` and `duration`
in seconds for a part of a file. All columns are kept in the sample's JSON.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.formats.records import AUDIO_NAMES, read_records
from torchtitan.models.dit_tts.prepare.recordings import (
    KEY_NAMES,
    TEXT_NAMES,
    Item,
    ItemRules,
    Unusable,
    make_item,
    sample_key,
)

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
_FOLDER_NAMES = ("manifest.jsonl", "manifest.csv", "manifest.tsv", "metadata.jsonl")


class Manifest:
    """Its keys are the rows' own, or the audio's path without its kind (and the part's offset)."""

    self_contained = False

    def __init__(self, source: str, rules: ItemRules):
        path = self._find(source)
        if path is None:
            raise InputError(
                f"{source}: is no manifest; give a file that ends in {', '.join(SUFFIXES)}, or a "
                f"folder with one of {', '.join(_FOLDER_NAMES)}"
            )
        self.root, self.name = os.path.split(os.path.abspath(path))
        self.rules = rules

    @classmethod
    def recognises(cls, source: str) -> bool:
        return cls._find(source) is not None

    @staticmethod
    def _find(source: str) -> str | None:
        if os.path.isfile(source):
            return source if source.endswith(SUFFIXES) else None
        there = [name for name in _FOLDER_NAMES if os.path.isfile(os.path.join(source, name))]
        return os.path.join(source, there[0]) if len(there) == 1 else None

    def files(self) -> list[str]:
        return [self.name]

    def items(self) -> Iterator[Item | Unusable]:
        for number, row in self._rows():
            if isinstance(row, Unusable):
                yield row
                continue
            try:
                yield self._item(number, row)
            except ValueError as error:
                yield Unusable(f"{self.name} row {number}", str(error))

    def _rows(self) -> Iterator[tuple[int, dict[str, Any] | Unusable]]:
        """(number of the row from 1, its columns)."""
        path = os.path.join(self.root, self.name)
        # A sheet saved by a spreadsheet begins with a byte-order mark.
        with open(path, encoding="utf-8-sig", errors="backslashreplace", newline="") as file:
            if self.name.endswith((".csv", ".tsv")):
                header, records = read_records(file, self.name.endswith(".tsv"))
                if not set(AUDIO_NAMES) & set(header):
                    raise InputError(
                        f"{path}: its first line is {header}; a header with one of "
                        f"{', '.join(AUDIO_NAMES)} is needed"
                    )
                for number, (line, record) in enumerate(records, 1):
                    yield number, self._record_row(header, number, line, record)
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, self._json_row(number, line)

    def _record_row(
        self, header: list[str], number: int, line: int, record: list[str] | str
    ) -> dict[str, Any] | Unusable:
        if isinstance(record, str):
            return Unusable(f"{self.name} line {line}", record)
        if len(record) != len(header):
            return Unusable(
                f"{self.name} row {number}", f"has not the {len(header)} fields of the header"
            )
        # pandas writes its index as a column without a name.
        named = {name: value for name, value in zip(header, record, strict=True) if name}
        row = {name: value for name, value in named.items() if value != ""}
        texts = (self.rules.text_column,) if self.rules.text_column else TEXT_NAMES
        if not any(name in row for name in texts):
            # Silence, as an empty text in JSON is, rather than a column that is missing.
            row |= {name: "" for name in texts if name in named}
        return row

    def _json_row(self, number: int, line: str) -> dict[str, Any] | Unusable:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            return row
        return Unusable(
            f"{self.name} line {number}", "is no JSON object; a manifest has one in each line"
        )

    def _item(self, number: int, row: dict[str, Any]) -> Item | Unusable:
        path = next((row[name] for name in AUDIO_NAMES if row.get(name)), None)
        if not isinstance(path, str):
            return Unusable(
                f"{self.name} row {number}", f"names no audio file as {' or '.join(AUDIO_NAMES)}"
            )
        place: dict[str, Any] = {"file": path}
        name = next((str(row[name]) for name in KEY_NAMES if row.get(name) not in (None, "")), None)
        if row.get("offset") not in (None, ""):
            place |= {
                "offset": _seconds(row, "offset"),
                "seconds": _seconds(row, "duration") if row.get("duration") else None,
            }
        if name is None:
            relative = os.path.relpath(os.path.join(self.root, path), self.root)
            name = os.path.splitext(path if relative.startswith("..") else relative)[0]
            if "offset" in place:  # several parts of one file
                name += f"-{round(place['offset'] * 1000):08d}"
        return make_item(row, sample_key(name), place, self.rules)


def _seconds(row: dict[str, Any], name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f'has "{name}" = {row[name]!r}; a number of seconds is needed')
    return value
