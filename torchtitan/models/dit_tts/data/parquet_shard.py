"""A shard as a Parquet file: the samples of a tar as rows, with the same bytes.

One row per sample, no column compressed or dictionary-encoded, as float16 latents hardly compress:

    key                        string
    frames, reference_frames   int32    rows of the arrays
    latents, reference         binary   float16 or float32 (rows, width), little-endian: KEY.npy behind its header
    metadata                   string   KEY.json

The schema's metadata has `titan_tts.channels`, the width of the latents, and may have `titan_tts.shard_bytes`: the
size of the tar that it was made from, which is a part of a shard's fingerprint. So both are the same shard.

Each value is one piece of the file, so the index has its offset and samples are read as those of a tar are. Parquet
has no offsets of values, but within a column's chunk they stand one behind the other, each behind its length. So
they are searched for: what is found are the bytes that pyarrow reads as the value, whatever lies between.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.storage import ShardFile, plain_name
from torchtitan.models.dit_tts.errors import InputError, first_line
from torchtitan.models.dit_tts.files import atomic_file, is_remote

if TYPE_CHECKING:  # takes long to import, and few runs need it
    import pyarrow

_GROUP_BYTES = 32 << 20  # of rows that are written, and later indexed, at once
_CHANNELS, _SHARD_BYTES = b"titan_tts.channels", b"titan_tts.shard_bytes"
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}  # the last two are of levels
_ADVICE = (
    "write such shards by titan-tts data export DATA OUT --to parquet, or read other tables by titan-tts "
    "prepare FILE DATA"
)


class Cell(NamedTuple):
    """A value: its bytes, None where it is missing, where they begin in the file, and how many rows of an array they
    are (0: the JSON)."""

    data: bytes | None
    rows: int = 0
    offset: int = 0


class Row(NamedTuple):
    """A sample; arrays in the order of `members.ARRAYS`."""

    key: str
    arrays: Sequence[Cell]
    metadata: Cell


class CorruptParquet(Exception):
    """A file, or a part of one, is no Parquet or a corrupt one, by pyarrow's words."""


class ParquetShard:
    """An open file; CorruptParquet where it is none, InputError where it is a table of another kind.

    Attributes:
        channels: width of the latents.
        shard_bytes: size that counts in the fingerprint.
    """

    def __init__(self, source: ShardFile):
        import pyarrow.parquet

        self._name, self._file = plain_name(source.path), _File(source)
        with _corruption():
            self._parquet = pyarrow.parquet.ParquetFile(pyarrow.PythonFile(self._file, mode="r"))
            schema = self._parquet.schema_arrow
            check_names_once(schema)
        for wanted in shard_schema():
            found = schema.field(wanted.name).type if wanted.name in schema.names else "missing"
            self._require(
                found == wanted.type, f"its column {wanted.name} is {found}, not {wanted.type}"
            )
        stored = schema.metadata or {}
        channels = stored.get(_CHANNELS, b"")
        is_count = channels.isdigit() and len(channels) < 8 and int(channels) > 0
        self._require(is_count, f"its {_CHANNELS.decode()} is no number of channels")
        self.channels = int(channels)
        size = stored.get(_SHARD_BYTES, b"%d" % source.size)
        is_size = size.isdigit() and len(size) < 20 and 0 < int(size) < 2**63
        self._require(is_size, f"its {_SHARD_BYTES.decode()} is no number of bytes")
        self.shard_bytes = int(size)

    def rows(self, report: Callable[[str], None]) -> Iterator[Row]:
        """All rows, one group of them in memory at a time. `report`: gets a sentence about each group that cannot
        be read."""
        if not self._parquet.num_row_groups:
            report("it has no row; export it again")
        for number in range(self._parquet.num_row_groups):
            try:
                with _corruption():
                    rows = self._group(number)
            except CorruptParquet as error:
                report(f"its row group {number} is corrupt ({error}); copy or export it again")
                continue
            yield from rows

    def _group(self, number: int) -> list[Row]:
        group = self._parquet.metadata.row_group(number)
        of_name = {c.path_in_schema: c for c in map(group.column, range(group.num_columns))}
        spans = {}
        for name in [*(array.name for array in members.ARRAYS), "metadata"]:
            column = of_name[name]
            is_plain = column.compression == "UNCOMPRESSED" and set(column.encodings) <= _PLAIN
            self._require(
                is_plain, f"its column {name} is {column.compression} {column.encodings}, not plain"
            )
            spans[name] = column.data_page_offset, column.total_compressed_size
        begin = min(start for start, _ in spans.values())
        held = self._file.hold(begin, max(start + size for start, size in spans.values()))
        table = self._parquet.read_row_group(number, use_threads=False)
        cells = {
            name: _located(table.column(name), held, begin, start, start + size)
            for name, (start, size) in spans.items()
        }
        for array in members.ARRAYS:
            rows = table.column(array.length).fill_null(-1).to_pylist()
            cells[array.name] = [c._replace(rows=n) for c, n in zip(cells[array.name], rows)]
        keys = table.column("key").fill_null("").to_pylist()
        arrays = zip(*(cells[array.name] for array in members.ARRAYS))
        return list(map(Row, keys, arrays, cells["metadata"]))

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise InputError(f"{self._name}: is no shard of latents, as {otherwise}; {_ADVICE}")


def is_latent_shard(source: ShardFile) -> bool:
    """Whether a Parquet file is such a shard, and not another table."""
    try:
        ParquetShard(source)
    except (InputError, CorruptParquet):
        return False
    return True


def write_parquet_shard(
    path: str | Path, rows: Iterable[dict[str, Any]], channels: int, shard_bytes: int | None = None
) -> None:
    """Writes rows of the columns, of which some megabytes are in memory at a time, complete or not at all.
    `shard_bytes`: of the tar that they are of; None where they are not what it holds."""
    import pyarrow
    import pyarrow.parquet

    stored = {_CHANNELS: b"%d" % channels}
    if shard_bytes is not None:
        stored[_SHARD_BYTES] = b"%d" % shard_bytes
    schema = shard_schema().with_metadata(stored)
    with (
        atomic_file(path) as file,
        pyarrow.parquet.ParquetWriter(
            file, schema, compression="none", use_dictionary=False, write_statistics=False
        ) as writer,
    ):
        group: list[dict[str, Any]] = []
        size = 0
        for row in rows:
            group.append(row)
            size += sum(len(row[array.name]) for array in members.ARRAYS)
            if size >= _GROUP_BYTES:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group, size = [], 0
        if group:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


def shard_schema() -> "pyarrow.Schema":
    """The columns of a shard."""
    import pyarrow

    fields = {"key": pyarrow.string()}
    fields |= dict.fromkeys(members.length_columns(), pyarrow.int32())
    fields |= dict.fromkeys((array.name for array in members.ARRAYS), pyarrow.binary())
    fields["metadata"] = pyarrow.string()
    return pyarrow.schema([pyarrow.field(*field, nullable=False) for field in fields.items()])


def check_names_once(fields: "Iterable[pyarrow.Field]") -> None:
    """Raises ValueError where two columns, or two fields of one, have a name: which of them is meant nobody knows."""
    from pyarrow import types

    fields = list(fields)
    name, count = Counter(field.name for field in fields).most_common(1)[0] if fields else ("", 0)
    if count > 1:
        raise ValueError(f"{name!r} is there {count} times; give each column a name of its own")
    for kind in (getattr(field.type, "storage_type", field.type) for field in fields):
        if types.is_nested(kind):
            inner = [kind.field(number) for number in range(kind.num_fields)]
            check_names_once(inner)


def _located(
    column: "pyarrow.ChunkedArray", held: bytes, begin: int, start: int, stop: int
) -> list[Cell]:
    """The values of a column whose chunk is bytes [start, stop) of the file; `held` are those from `begin` on."""
    cells: list[Cell] = []
    position = start - begin
    for scalar in column:
        if not scalar.is_valid:
            cells.append(Cell(None))
            continue
        data = scalar.as_buffer().to_pybytes()
        found = held.find(len(data).to_bytes(4, "little") + data, position, stop - begin)
        if found < 0:
            raise ValueError("a value is not where its column is")
        position = found + 4 + len(data)
        cells.append(Cell(data, 0, begin + position - len(data)))
    return cells


@contextmanager
def _corruption() -> Iterator[None]:
    """What pyarrow says about a corrupt file becomes a CorruptParquet of one line."""
    import pyarrow

    try:
        yield
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CorruptParquet(first_line(error)) from None


class _File(io.RawIOBase):
    """A file as pyarrow reads it, with a part of it in memory."""

    def __init__(self, source: ShardFile):
        self._source, self._position = source, 0
        self._begin, self._held = 0, b""

    def hold(self, start: int, stop: int) -> bytes:
        """Reads bytes [start, stop) ahead, in place of an earlier part."""
        self._begin, self._held = start, b""
        self._held = self._pread(stop - start, start)
        return self._held

    def _pread(self, size: int, offset: int) -> bytes:
        if self._begin <= offset and offset + size <= self._begin + len(self._held):
            return self._held[offset - self._begin : offset - self._begin + size]
        try:
            return self._source.pread(size, offset)
        except InputError as error:
            if is_remote(self._source.path):
                raise
            raise OSError(str(error)) from None  # of this part of a disk: the rest may be readable

    def read(self, size: int = -1) -> bytes:
        data = self._pread(size if size >= 0 else self._source.size, self._position)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}
        self._position = origin[whence] + offset
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
