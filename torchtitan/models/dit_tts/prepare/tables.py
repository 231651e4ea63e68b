"""Rows of Parquet and Arrow files, without holding more than a few of them in memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan.models.dit_tts.errors import InputError

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 16
LISTED_AT_ONCE = 1024
_ARROW_FILE_START = b"ARROW1"


class Table:
    """One Parquet or Arrow file; `groups` are its row groups, or its record batches.

    Raises:
        InputError: the file is neither, or damaged.
    """

    def __init__(self, path: str):
        import pyarrow

        self.path = path
        self._batches: list[pyarrow.RecordBatch] = []
        self._parquet = None
        try:
            if path.endswith(".parquet"):
                import pyarrow.parquet

                self._parquet = pyarrow.parquet.ParquetFile(path)
                self.schema = self._parquet.schema_arrow
                self.groups = self._parquet.num_row_groups
            else:
                self._batches, self.schema = _open_arrow(path)
                self.groups = len(self._batches)
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(path, error) from None

    def batches(
        self, group: int, columns: list[str], rows_at_once: int
    ) -> Iterator["pyarrow.RecordBatch"]:
        """The rows of a group, a few at a time; of an Arrow file views of the file."""
        import pyarrow

        try:
            if self._parquet is None:
                yield self._batches[group].select(columns)
            else:
                yield from self._parquet.iter_batches(
                    rows_at_once, row_groups=[group], columns=columns, use_threads=False
                )
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(self.path, error) from None

    def all_null(self, column: str, field: str) -> bool:
        """Whether a field of a struct is null in every row, as far as the file's statistics tell."""
        struct = column_names(self)[column]
        if struct.get_field_index(field) < 0 or str(struct.field(field).type) == "null":
            return True
        if self._parquet is None:
            arrays = [batch.column(column) for batch in self._batches]
            arrays = [getattr(array, "storage", array) for array in arrays]
            return all(array.field(field).null_count == len(array) for array in arrays)
        for number in range(self.groups):
            group = self._parquet.metadata.row_group(number)
            for leaf in map(group.column, range(group.num_columns)):
                if leaf.path_in_schema == f"{column}.{field}":
                    found = leaf.statistics
                    if found is None or found.null_count != group.num_rows:
                        return False
        return True


def rows_of(batch: "pyarrow.RecordBatch", path: str) -> list[dict[str, Any]]:
    """The rows of a batch as plain values.

    Raises:
        InputError: a value that Python has no type for, such as a date after the year 9999.
    """
    import pyarrow

    try:
        return batch.to_pylist()
    except (pyarrow.ArrowException, OverflowError, ValueError, LookupError) as error:
        raise _unreadable(path, error) from None


def _open_arrow(path: str) -> tuple[list["pyarrow.RecordBatch"], "pyarrow.Schema"]:
    """Record batches over a memory map, of the file format or of the stream format."""
    import pyarrow

    mapped = pyarrow.memory_map(path)
    if mapped.size() >= len(_ARROW_FILE_START) and mapped.read_at(6, 0) == _ARROW_FILE_START:
        file = pyarrow.ipc.open_file(mapped)
        return [file.get_batch(n) for n in range(file.num_record_batches)], file.schema
    stream = pyarrow.ipc.open_stream(mapped)
    return list(stream), stream.schema


def _unreadable(path: str, error: Exception) -> InputError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InputError(
        f"{path}: cannot be read as a table ({said}); give a sound Parquet or Arrow file"
    )


class TableCursor:
    """Rows of a table asked for one at a time, mostly forwards: going on costs nothing twice."""

    def __init__(self, path: str, columns: tuple[str, ...]):
        self.path, self.columns = path, columns
        self._table = Table(path)
        self._group = -1
        self._first = self._stop = 0
        self._batch: pyarrow.RecordBatch | None = None
        self._rest: Iterator[pyarrow.RecordBatch] = iter(())

    def row(self, group: int, row: int) -> dict[str, "pyarrow.Scalar"]:
        """{column: scalar} of a row of a group."""
        if group != self._group or row < self._first:
            self._rest = self._table.batches(group, list(self.columns), ROWS_AT_ONCE)
            self._group, self._first, self._stop, self._batch = group, 0, 0, None
        while row >= self._stop:
            self._batch = next(self._rest, None)
            if self._batch is None:
                raise InputError(f"{self.path} ends before row {row} of group {group}; it changed")
            self._first, self._stop = self._stop, self._stop + self._batch.num_rows
        return {name: self._batch.column(name)[row - self._first] for name in self.columns}


def matrix(cell: "pyarrow.Scalar", channels: int, name: str) -> np.ndarray:
    """Latents (T, channels) float32 of a cell: a list of lists, or a flat list, of numbers."""
    import pyarrow
    import pyarrow.compute

    if isinstance(cell, pyarrow.ExtensionScalar):
        cell = cell.value
    if not cell.is_valid:
        raise InputError(f"column {name} is null")
    values = cell.values
    if pyarrow.types.is_nested(values.type):
        widths = set(pyarrow.compute.list_value_length(values).to_pylist())
        if widths - {channels}:
            raise InputError(
                f"column {name} has frames of {sorted(map(str, widths))} values; {channels} are needed"
            )
        values = values.flatten()
    if values.null_count or not (
        pyarrow.types.is_floating(values.type) or pyarrow.types.is_integer(values.type)
    ):
        raise InputError(f"column {name} holds {values.type} with {values.null_count} nulls")
    numbers = values.to_numpy(zero_copy_only=False).astype(np.float32)
    if len(numbers) % channels:
        raise InputError(
            f"column {name} has {len(numbers)} values, no multiple of the {channels} of a frame"
        )
    if not np.isfinite(numbers).all() or np.abs(numbers).max(initial=0) > np.finfo(np.float16).max:
        raise InputError(f"column {name} has values that are not finite in float16")
    return numbers.reshape(-1, channels)


def column_names(table: Table) -> dict[str, Any]:
    """{name: type} of a table's columns, extension types by what they are stored as."""
    import pyarrow

    return {
        field.name: field.type.storage_type
        if isinstance(field.type, pyarrow.BaseExtensionType)
        else field.type
        for field in table.schema
    }
