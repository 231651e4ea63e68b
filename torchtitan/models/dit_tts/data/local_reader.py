"""Read a sample's bytes out of local tars: where they lie, one read for all, and into the batch."""

import os
import threading
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan.models.dit_tts.errors import InputError

# Below the usual limit of 1024 open files a process, with room for everything else.
MAX_OPEN_SHARDS = 256
# torch runs an element-wise operation in one thread below 32768 elements. Staying below keeps
# each loader thread from starting a pool of OpenMP threads of its own.
_SERIAL_ELEMENTS = 32768 - 1
_DTYPES = {2: np.dtype("<f2"), 4: np.dtype("<f4")}
# A sample whose members stand together is read at once; this much between them is worth it.
_MOST_GAP_BYTES = 1 << 16

# What a read needs of the index, in one row: one look-up brings all of it as Python integers.
ROW = np.dtype(
    [
        ("shard", "<i4"),
        ("latents_offset", "<i8"),
        ("frames", "<i4"),
        ("latents_item_bytes", "<u1"),
        ("latents_hash", "<u8"),
        ("reference_offset", "<i8"),
        ("reference_frames", "<i4"),
        ("reference_item_bytes", "<u1"),
        ("reference_hash", "<u8"),
        ("metadata_offset", "<i8"),
        ("metadata_bytes", "<i4"),
        ("metadata_hash", "<u8"),
    ]
)


PARTS = ("latents", "reference", "JSON")


class SampleExtents(NamedTuple):
    """Where a sample lies.

    Attributes:
        shard: number of its shard.
        spans: byte ranges [start, stop) of the tar.
        parts: [start, stop) of each of ``PARTS`` within the spans' joined bytes.
        hashes: XXH3 of each.
    """

    shard: int
    spans: list[tuple[int, int]]
    parts: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    hashes: tuple[int, int, int]
    latents_item_bytes: int
    reference_item_bytes: int


def layout_of(row: tuple, channels: int) -> SampleExtents:
    """From a row of ``ROW`` as a tuple."""
    (
        shard,
        latents_offset,
        frames,
        item_bytes,
        latents_hash,
        reference_offset,
        reference_frames,
        reference_item_bytes,
        reference_hash,
        metadata_offset,
        metadata_bytes,
        metadata_hash,
    ) = row
    latents_bytes = frames * channels * item_bytes
    reference_bytes = reference_frames * channels * reference_item_bytes
    if latents_offset < reference_offset < metadata_offset:  # as our writer has them
        start, stop = latents_offset, metadata_offset + metadata_bytes
    else:
        start = min(latents_offset, reference_offset, metadata_offset)
        stop = max(
            latents_offset + latents_bytes,
            reference_offset + reference_bytes,
            metadata_offset + metadata_bytes,
        )
    if stop - start - latents_bytes - reference_bytes - metadata_bytes <= _MOST_GAP_BYTES:
        spans = [(start, stop)]
        latents_at = latents_offset - start
        reference_at = reference_offset - start
        metadata_at = metadata_offset - start
    else:
        spans = [
            (latents_offset, latents_offset + latents_bytes),
            (reference_offset, reference_offset + reference_bytes),
            (metadata_offset, metadata_offset + metadata_bytes),
        ]
        latents_at, reference_at = 0, latents_bytes
        metadata_at = latents_bytes + reference_bytes
    parts = (
        (latents_at, latents_at + latents_bytes),
        (reference_at, reference_at + reference_bytes),
        (metadata_at, metadata_at + metadata_bytes),
    )
    hashes = (latents_hash, reference_hash, metadata_hash)
    return SampleExtents(shard, spans, parts, hashes, item_bytes, reference_item_bytes)


class _OpenFile:
    """A file descriptor that closes itself when its last reader lets go of it."""

    def __init__(self, tar_path: str, expected_bytes: int):
        try:
            self.descriptor = os.open(tar_path, os.O_RDONLY)
        except OSError as error:
            raise InputError(
                f"{tar_path}: cannot be opened any more ({error.strerror}); restore it and start "
                "again."
            ) from None
        # Not __del__: at the interpreter's exit it would find no os any more.
        weakref.finalize(self, os.close, self.descriptor)
        if hasattr(os, "posix_fadvise"):
            # Samples are read in random order: what the kernel would read ahead is not wanted.
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        found = os.fstat(self.descriptor).st_size
        if found != expected_bytes:
            raise InputError(
                f"{tar_path}: has {found} bytes where its index was made from {expected_bytes}; "
                "shards must not change during a run, so start again."
            )


class LocalFiles:
    """Reads spans of tars from any thread, with a bounded number of open files.

    A pickled copy opens its own files.
    """

    def __init__(self, tar_paths: list[str], tar_bytes: list[int]):
        self._tar_paths = tar_paths
        self._tar_bytes = tar_bytes
        self._start()

    def _start(self) -> None:
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._buffers = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"tar_paths": self._tar_paths, "tar_bytes": self._tar_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tar_paths, self._tar_bytes = state["tar_paths"], state["tar_bytes"]
        self._start()

    def read_spans(self, shard: int, spans: list[tuple[int, int]]) -> memoryview:
        """The joined bytes of the spans, valid until this thread's next read.

        Raises:
            OSError: the disk cannot read them.
            InputError: the tar is gone or has changed.
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
        """Fill ``target``, a view of bytes; raises as ``read_spans`` does."""
        file = self._file(shard)
        while len(target):
            count = os.preadv(file.descriptor, [target], offset)
            if count == 0:
                raise InputError(
                    f"{self._tar_paths[shard]}: ends before a sample does, so it changed "
                    "during the run; restore the shard and start again."
                )
            target, offset = target[count:], offset + count

    def _file(self, shard: int) -> _OpenFile:
        file = self._files.get(shard)
        if file is not None and len(self._tar_paths) <= MAX_OPEN_SHARDS:
            return file  # none is ever closed, so their order is of no interest
        with self._lock:
            file = self._files.get(shard)
            if file is None:
                file = _OpenFile(self._tar_paths[shard], self._tar_bytes[shard])
                self._files[shard] = file
                if len(self._files) > MAX_OPEN_SHARDS:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(shard)
            return file


def fill(stored: memoryview, item_bytes: int, out: np.ndarray) -> np.ndarray:
    """Copy stored rows into the first rows of ``out`` (rows, C) and return those."""
    source = np.frombuffer(stored, _DTYPES[item_bytes]).reshape(-1, out.shape[1])
    if len(source) > len(out):
        source = source[: len(out)]
    target = out[: len(source)]
    if item_bytes == out.itemsize or not source.flags.aligned:
        target[:] = source
        return target
    # Between float16 and float32: torch converts 20 times faster than numpy.
    source_tensor, target_tensor = torch.from_numpy(source), torch.from_numpy(target)
    if target.size <= _SERIAL_ELEMENTS or torch.get_num_threads() == 1:
        target_tensor.copy_(source_tensor)
        return target
    rows = max(1, _SERIAL_ELEMENTS // target.shape[1])
    for start in range(0, len(target), rows):
        target_tensor[start : start + rows].copy_(source_tensor[start : start + rows])
    return target
