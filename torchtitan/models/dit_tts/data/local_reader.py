"""Read a sample's bytes out of local tars: where they lie, one read for all, and into the batch."""

import os
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.storage import LocalSource
from torchtitan.models.dit_tts.errors import InputError

# Below the usual limit of 1024 open files a process, with room for everything else.
MAX_OPEN_SHARDS = 256
# torch runs an element-wise operation in one thread below 32768 elements. Staying below keeps
# each loader thread from starting a pool of OpenMP threads of its own.
_SERIAL_ELEMENTS = 32768 - 1
_DTYPES: dict[int, np.dtype] = {2: np.dtype("<f2"), 4: np.dtype("<f4")}
# A sample whose members stand together is read at once; this much between them is worth it.
_MAX_GAP_BYTES = 1 << 16


class SampleExtents(NamedTuple):
    """Where a sample's members lie: its arrays in the order of `members.ARRAYS`, then the JSON.

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

    def only(self, part: int) -> "SampleExtents":
        """Of one member: 0 for the latents, -1 for the JSON."""
        start, stop = self.parts[part]
        offset = self.spans[part][0] if len(self.spans) > 1 else self.spans[0][0] + start
        span = offset, offset + stop - start
        item_bytes = self.item_bytes[part : part + 1]  # empty for the JSON
        return SampleExtents([span], [(0, stop - start)], (self.hashes[part],), item_bytes)


class ExtentTable:
    """The extents of any sample; `rows` has them as columns. `column`: (samples,) the column of
    `members.index_dtype()` of that name, over all shards.
    """

    def __init__(self, column: Callable[[str], np.ndarray], channels: int):
        arrays = [member.name for member in members.ARRAYS]
        names = [*arrays, "metadata"]
        offsets = [column(f"{name}_offset") for name in names]
        sizes = [
            column(member.length)
            * (column(f"{member.name}_item_bytes") * np.int64(member.width or channels))
            for member in members.ARRAYS
        ]
        sizes.append(column("metadata_bytes"))
        first = np.minimum.reduce(offsets)
        last = np.maximum.reduce([offset + size for offset, size in zip(offsets, sizes)])
        scattered = last - first - sum(sizes) > _MAX_GAP_BYTES
        # All that a read needs in one row: one look-up brings it as Python integers.
        ends = [f"{name}_{end}" for name in names for end in ("start", "stop")]
        hashes, item_bytes = [f"{n}_hash" for n in names], [f"{n}_item_bytes" for n in arrays]
        kinds = {"first": "<i8", "last": "<i8"} | dict.fromkeys(ends, "<u4")
        kinds |= dict.fromkeys(hashes, "<u8") | dict.fromkeys(item_bytes, "<u1")
        self.rows = np.empty(len(first), list(kinds.items()))
        self.rows["first"], self.rows["last"] = first, last
        position = np.zeros(len(first), np.int64)
        for name, offset, size in zip(names, offsets, sizes):
            start = np.where(scattered, position, offset - first)
            self.rows[f"{name}_start"], self.rows[f"{name}_stop"] = start, start + size
            position += size
        for name in (*hashes, *item_bytes):
            self.rows[name] = column(name)
        count = len(names)
        self._starts, self._stops = slice(2, 2 + 2 * count, 2), slice(3, 2 + 2 * count, 2)
        self._hashes = slice(2 + 2 * count, 2 + 3 * count)
        self._item_bytes = slice(2 + 3 * count, None)
        self._scattered = {
            sample: [int(offset[sample]) for offset in offsets]
            for sample in np.flatnonzero(scattered).tolist()
        }

    def __getitem__(self, sample: int) -> SampleExtents:
        row = self.rows[sample].item()
        parts = list(zip(row[self._starts], row[self._stops]))
        spans = [row[:2]]
        if sample in self._scattered:
            offsets = self._scattered[sample]
            spans = [
                (offset, offset + stop - start) for offset, (start, stop) in zip(offsets, parts)
            ]
        return SampleExtents(spans, parts, row[self._hashes], row[self._item_bytes])


class LocalFiles:
    """Reads spans of tars from any thread, with a bounded number of open files."""

    def __init__(self, tar_paths: list[str], tar_bytes: list[int]):
        self._tar_paths = tar_paths
        # A file closes itself when its last reader lets go of it.
        self._file = lru_cache(MAX_OPEN_SHARDS)(partial(_open, tar_paths, tar_bytes))
        self._buffers = threading.local()

    def read_spans(self, shard: int, spans: list[tuple[int, int]]) -> memoryview:
        """The joined bytes of the spans, valid until this thread's next read.

        Raises:
            OSError: the disk cannot read them.
        """
        size = 0
        for start, stop in spans:
            size += stop - start
        buffer = getattr(self._buffers, "bytes", None)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers.bytes = memoryview(bytearray(size + size // 2))
        filled = 0
        for start, stop in spans:
            self.read_into(shard, buffer[filled : filled + stop - start], start)
            filled += stop - start
        return buffer[:size]

    def read_into(self, shard: int, target: memoryview, offset: int) -> None:
        """Fill `target`, a view of bytes; raises as `read_spans` does."""
        file = self._file(shard)
        while (count := os.preadv(file.descriptor, [target], offset)) < len(target):
            if count == 0:
                raise InputError(
                    f"{self._tar_paths[shard]}: ends before a sample does, so it changed "
                    "during the run; restore the shard and start again"
                )
            target, offset = target[count:], offset + count


def _open(tar_paths: list[str], tar_bytes: list[int], shard: int) -> LocalSource:
    file, expected = LocalSource(tar_paths[shard]), tar_bytes[shard]
    if file.size != expected:
        raise InputError(
            f"{file.path}: has {file.size} bytes, but its index was made from {expected}; shards "
            "must not change during a run, so start again"
        )
    if hasattr(os, "posix_fadvise"):
        # Samples are read in random order, so reading ahead would be wasted.
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return file


def fill(stored: memoryview, item_bytes: int, out: np.ndarray, crop: int = 0) -> np.ndarray:
    """Copy stored rows into the first rows of `out` (rows, width) and return those. `crop`: where
    there are more rows than `out` has, a number that chooses which consecutive ones are copied:
    uniform over all starts for a random 64-bit number, and the first ones for 0.
    """
    source = np.frombuffer(stored, _DTYPES[item_bytes]).reshape(-1, out.shape[1])
    excess = len(source) - len(out)
    if excess > 0:
        start = crop % (excess + 1)
        source = source[start : start + len(out)]
    target = out[: len(source)] if excess < 0 else out
    if item_bytes == out.itemsize or not source.flags.aligned:
        target[:] = source
    # Between float16 and float32: torch converts 20 times faster than numpy.
    elif target.size <= _SERIAL_ELEMENTS or torch.get_num_threads() == 1:
        torch.from_numpy(target).copy_(torch.from_numpy(source))
    else:
        rows = max(1, _SERIAL_ELEMENTS // target.shape[1])
        for start in range(0, len(target), rows):
            part = torch.from_numpy(target[start : start + rows])
            part.copy_(torch.from_numpy(source[start : start + rows]))
    return target
