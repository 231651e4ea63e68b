"""Byte ranges of a sample in its tar, and reading of them into a batch."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from torchtitan.models.dit_tts.data import members

# torch runs an element-wise operation in one thread below 32768 elements. Staying below keeps
# each loader thread from starting a pool of OpenMP threads of its own.
_SERIAL_ELEMENTS = 32768 - 1
_DTYPES: dict[int, np.dtype] = {2: np.dtype("<f2"), 4: np.dtype("<f4")}
# A sample whose members stand together is read at once; this much between them is worth it.
_MAX_GAP_BYTES = 1 << 16


class SampleExtents(NamedTuple):
    """Byte ranges of a sample's members: arrays in the order of `members.ARRAYS`, then the JSON.

    Attributes:
        spans: byte ranges [start, stop) of the tar.
        parts: [start, stop) of each member within the spans' joined bytes.
        hashes: XXH3 of each member.
        item_bytes: of each array.
    """

    spans: list[tuple[int, int]]
    parts: list[tuple[int, int]]
    hashes: tuple[int, ...]
    item_bytes: tuple[int, ...]


class ExtentTable:
    """The extents of any sample; `rows` has them as columns. `column`: (samples,) the column of
    `members.index_dtype()` of that name, over all shards.
    """

    def __init__(self, column: Callable[[str], np.ndarray], channels: int):
        names = [*(member.name for member in members.ARRAYS), "metadata"]
        columns = {f"{name}_offset": column(f"{name}_offset") for name in names}
        for member in members.ARRAYS:
            row_bytes = column(f"{member.name}_item_bytes") * np.int64(member.width or channels)
            columns[f"{member.name}_bytes"] = column(member.length) * row_bytes
        columns["metadata_bytes"] = column("metadata_bytes")
        columns |= {f"{name}_hash": column(f"{name}_hash") for name in names}
        columns |= {f"{name}_item_bytes": column(f"{name}_item_bytes") for name in names[:-1]}
        # All that a read needs in one row: one look-up brings it as Python integers.
        self.rows = np.empty(
            len(columns["metadata_offset"]), [(name, each.dtype) for name, each in columns.items()]
        )
        for name, each in columns.items():
            self.rows[name] = each
        self._count = len(names)

    def of(self, sample: int, chosen: slice = slice(None)) -> SampleExtents:
        """The extents of a sample's members, or of those chosen."""
        row, n = self.rows[sample].item(), self._count
        offsets, sizes, hashes, item_bytes = (
            row[first : first + n][chosen] for first in range(0, 4 * n, n)
        )
        ends = list(map(int.__add__, offsets, sizes))
        first, last = min(offsets), max(ends)
        if last - first - sum(sizes) > _MAX_GAP_BYTES:
            spans, parts = list(zip(offsets, ends)), list(pairwise(accumulate(sizes, initial=0)))
        else:
            spans = [(first, last)]
            parts = [(offset - first, end - first) for offset, end in zip(offsets, ends)]
        return SampleExtents(spans, parts, hashes, item_bytes)


def fill(stored: memoryview, item_bytes: int, out: np.ndarray, crop: int = 0) -> np.ndarray:
    """Copy stored rows into the first rows of `out` (rows, width) and return those. `crop`: where
    there are more rows than `out` has, a number that chooses which consecutive ones are copied:
    uniform over all starts for a random 64-bit number, and the first ones for 0.
    """
    source = np.frombuffer(stored, _DTYPES[item_bytes]).reshape(-1, out.shape[1])
    first = crop % (max(0, len(source) - len(out)) + 1)
    source = source[first : first + len(out)]
    target = out[: len(source)]
    if item_bytes == out.itemsize or not source.flags.aligned:
        target[:] = source
        return target
    # Between float16 and float32: torch converts 20 times faster than numpy.
    rows = max(1, _SERIAL_ELEMENTS // target.shape[1])
    for start in range(0, len(target), rows):
        part = slice(start, start + rows)
        torch.from_numpy(target[part]).copy_(torch.from_numpy(source[part]))
    return target
