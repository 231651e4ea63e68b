"""Parquet and Arrow tables: one row per recording, or per utterance that is encoded already.

Audio is a column `audio` (or another of its names): Hugging Face's struct of bytes and path, bytes,
or a path relative to the table. Ready latents are a column `latents`, and a `reference` where there
is one: lists of frames, or flat lists of all their values. All other columns but binary ones go into
the sample's JSON. In a shard as `titan-tts data export` writes it they are float16, and the JSON has a column.
"""

import os
import re
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from pyarrow import types

from titan_tts.prepare.formats import SourceError, common_folder, find_files, has_pattern
from titan_tts.prepare.settings import Options
from titan_tts.records.columns import (
    AUDIO_NAMES,
    KEY_NAMES,
    first_value,
    make_utterance,
    sample_key,
)
from titan_tts.records.json_lines import json_object
from titan_tts.records.utterance import Unusable, Utterance
from torchtitan.models.dit_tts.data.heldout import split_of
from torchtitan.models.dit_tts.data.members import ARRAYS, HASHES_KEY, length_columns
from torchtitan.models.dit_tts.errors import InputError, require

SUFFIXES = (".parquet", ".arrow", ".feather")
# A folder's name up to its first sign or figure; `valentina` holds nothing out.
_SPLIT_FOLDERS = (
    "train training dev development val valid validation eval evaluation test testing held heldout"
).split()
LATENTS, REFERENCE = "latents", "reference"
_LENGTHS = ("frames", "reference_frames")  # columns of a shard
_ROWS_AT_ONCE, _LISTED_AT_ONCE = 16, 1024


def shard_schema() -> "pyarrow.Schema":
    """The columns of a shard that `titan-tts data export` writes."""
    fields = {"key": pyarrow.string()}
    fields |= dict.fromkeys(length_columns(), pyarrow.int32())
    fields |= dict.fromkeys((array.name for array in ARRAYS), pyarrow.binary())
    fields["metadata"] = pyarrow.string()
    return pyarrow.schema([pyarrow.field(*field, nullable=False) for field in fields.items()])


class TableCorpus:
    """Keys are the rows' own, or the file's name and the number of the row in it."""

    self_contained = True

    def __init__(self, options: Options):
        source, self.options = options.source, options
        paths = find_files(source, SUFFIXES, below=True)
        suffixes = ", ".join(SUFFIXES)
        require(
            bool(paths), f"{source}: holds no {suffixes} file; give a table, a folder or a glob"
        )
        self.root = common_folder(paths)
        self.names = [os.path.relpath(path, self.root) for path in paths]
        base = _given_folder(source)
        self.splits = [_split_of_path(os.path.relpath(path, base)) for path in paths]

    @classmethod
    def recognizes(cls, source: str) -> bool:
        return bool(find_files(source, SUFFIXES, below=True))

    def files(self) -> dict[str, str]:
        return {name: os.path.join(self.root, name) for name in self.names}

    def items(self) -> Iterator[Utterance | Unusable]:
        for name, split in zip(self.names, self.splits, strict=True):
            table = Table(os.path.join(self.root, name))
            numbers = count()
            for group in range(table.groups):
                for row, values in enumerate(table.rows(group)):
                    place: dict[str, Any] = {"table": name, "group": group, "row": row}
                    own_name = f"{os.path.splitext(name)[0]}-{next(numbers):08d}"
                    if table.is_shard:
                        if None in values.values():
                            columns = ", ".join(values)
                            yield Unusable(own_name, f"has nulls in its columns {columns}")
                            continue
                        own_name, place["rows"] = values["key"], [values[n] for n in _LENGTHS]
                        values = json_object(values["metadata"]) or {}
                        values.pop(HASHES_KEY, None)
                    if split and not values.get("split"):
                        values["split"] = split
                    yield self._item(own_name, table, values, place)

    def _item(
        self, own_name: str, table: "Table", values: dict[str, Any], place: dict[str, Any]
    ) -> Utterance | Unusable:
        given = None if table.is_shard else first_value(values, KEY_NAMES)
        if table.payload == LATENTS:
            place |= {"latents": LATENTS, "reference": table.reference}
        else:
            place["column"] = table.payload
        key = sample_key(own_name if given is None else str(given))
        return make_utterance(values, key, place, self.options)


class Table:
    """One Parquet or Arrow file of `groups` row groups or record batches.

    `payload` is the column of the audio or the latents, and `reference` that of the references of latents, if any. In a
    shard, `is_shard`, latents are bytes.
    """

    def __init__(self, path: str):
        self.path = path
        self._batches: list[pyarrow.RecordBatch] = []
        self._parquet: pyarrow.parquet.ParquetFile | None = None
        try:
            if path.endswith(".parquet"):
                self._parquet = pyarrow.parquet.ParquetFile(path)
                schema, self.groups = self._parquet.schema_arrow, self._parquet.num_row_groups
            else:
                self._batches, schema = _open_arrow(path)
                self.groups = len(self._batches)
            if len(set(schema.names)) < len(schema.names):
                raise ValueError(f"{schema.names}: give each column a name of its own")
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        # Extension types by what they are stored as.
        names = {field.name: getattr(field.type, "storage_type", field.type) for field in schema}
        payload = next((name for name in (LATENTS, *AUDIO_NAMES) if name in names), None)
        if payload is None:
            needed = ", ".join((LATENTS, *AUDIO_NAMES))
            raise InputError(
                f"{path}: has the columns {', '.join(names)}; one of {needed} is needed"
            )
        self.payload = payload
        self.reference = REFERENCE if payload == LATENTS and REFERENCE in names else None
        self.is_shard = payload == LATENTS and "binary" in str(names[payload])
        for field in shard_schema() if self.is_shard else ():
            require(
                names.get(field.name) == field.type,
                f"{path}: has latents in bytes, as a shard has, but its column {field.name} is "
                f"{names.get(field.name, 'missing')}, not {field.type}; give latents as lists of numbers",
            )
        heavy = {self.reference, payload}
        heavy |= {n for n in names if types.is_binary(names[n]) or types.is_large_binary(names[n])}
        self._listed = [name for name in names if name not in heavy]

    def _batches_of(
        self, group: int, columns: list[str], rows_at_once: int
    ) -> Iterator["pyarrow.RecordBatch"]:
        """The rows of a group, a few at a time; an Arrow file's are views of the file."""
        failures = pyarrow.ArrowException, OSError  # pyarrow may be gone when a generator is closed
        try:
            if self._parquet is None:
                batch = self._batches[group].select(columns)
                starts = range(0, batch.num_rows, rows_at_once)
                yield from (batch.slice(start, rows_at_once) for start in starts)
            else:
                yield from self._parquet.iter_batches(
                    rows_at_once, row_groups=[group], columns=columns, use_threads=False
                )
        except failures as error:
            raise _unreadable(self.path, error) from None

    def rows(
        self, group: int, columns: list[str] | None = None, at_once: int = _LISTED_AT_ONCE
    ) -> Iterator[dict[str, Any]]:
        """The rows of a group as plain values: of these columns, or of all without audio, latents and other binary ones."""
        for batch in self._batches_of(group, columns or self._listed, at_once):
            try:
                yield from batch.to_pylist()
            # Python has no type for some values, such as a date after the year 9999.
            except (pyarrow.ArrowException, OverflowError, ValueError, LookupError) as error:
                raise _unreadable(self.path, error) from None


class TableCursor:
    """Rows of a table, read one at a time, mostly forwards: then no row is read twice."""

    def __init__(self, path: str, columns: tuple[str, ...]):
        self.path, self.columns, self._table = path, columns, Table(path)
        self._group, self._next = -1, 0
        self._rows: Iterator[dict[str, Any]] = iter(())

    def row(self, group: int, row: int) -> dict[str, Any]:
        """{column: value} of a row of a group."""
        if group != self._group or row < self._next:
            self._group, self._next = group, 0
            self._rows = self._table.rows(group, list(self.columns), _ROWS_AT_ONCE)
        found = next(islice(self._rows, row - self._next, None), None)
        self._next = row + 1
        if found is None:
            raise InputError(f"{self.path} ends before row {row} of group {group}; it changed")
        return found


def matrix(value: Any, channels: int, name: str, rows: int | None = None) -> np.ndarray:
    """A cell's latents (T, channels) float32, from a list of frames or a flat list of numbers, or of a shard from the
    bytes of so many rows."""
    if rows is not None:
        sizes = {rows * channels * int(kind[2]): kind for kind in ("<f4", "<f2")}
        needed = f"{rows} frames of {channels} channels"
        require(len(value) in sizes, f"column {name} has {len(value)} bytes for {needed}")
        value = np.frombuffer(value, sizes[len(value)])
    try:
        numbers: np.ndarray = np.array(value, np.float32)
    except (TypeError, ValueError):  # texts, or frames of several lengths
        numbers = np.zeros(())
    flat = numbers.ndim == 1 and numbers.size % channels == 0
    require(
        flat or (numbers.ndim == 2 and numbers.shape[1] == channels),
        f"column {name} holds {numbers.shape}; frames of {channels} numbers are needed",
    )
    finite = np.isfinite(numbers).all() and np.abs(numbers).max(initial=0) <= np.finfo("<f2").max
    require(bool(finite), f"column {name} has values that are missing or not finite in float16")
    return numbers.reshape(-1, channels)


def _open_arrow(path: str) -> tuple[list["pyarrow.RecordBatch"], "pyarrow.Schema"]:
    """Record batches over a memory map, of the file format or of the stream format."""
    mapped = pyarrow.memory_map(path)
    if mapped.size() >= 6 and mapped.read_at(6, 0) == b"ARROW1":
        file = pyarrow.ipc.open_file(mapped)
        return [file.get_batch(n) for n in range(file.num_record_batches)], file.schema
    stream = pyarrow.ipc.open_stream(mapped)
    return list(stream), stream.schema


def _unreadable(path: str, error: Exception) -> InputError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    # For a corrupt file pyarrow's OSError has no number.
    kind = SourceError if getattr(error, "errno", None) else InputError
    return kind(f"{path}: cannot be read as a table ({reason}); give a valid Parquet or Arrow file")


def _given_folder(source: str) -> str:
    """The folder that the source names: the source, its file's folder, or the one before a pattern."""
    if has_pattern(source) and not os.path.exists(source):
        source = re.split(r"[*?\[{]", source)[0] + "pattern"
    return source if os.path.isdir(source) else os.path.dirname(os.path.abspath(source))


def _split_of_path(path: str) -> str | None:
    """Hugging Face names the files after the split, `test-00000-of-00001`, or their folder."""
    *folders, name = path.split(os.sep)
    if split_of(name):
        return split_of(name)
    words = [re.split(r"[^a-z]", folder.lower())[0] for folder in reversed(folders)]
    return split_of(next((word for word in words if word in _SPLIT_FOLDERS), None))
