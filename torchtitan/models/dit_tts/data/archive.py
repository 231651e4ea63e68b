"""Open a dataset of tar shards and read any sample by offset.

>>> dataset = open_dataset("data/train")           # a folder, one .tar, or a glob
>>> dataset.sample_id(0), int(dataset.frames[0])
('000000:utt0001', 113)
>>> latents, reference = dataset.read(0)           # float32 (113, 128), (R, 128)

``read`` fills a caller's buffer straight from the file: no tar parsing, no memory map
(whose resident size grows with all it ever touched) and no allocation a sample.
"""

import glob
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ..errors import InputError
from .index import ShardIndex, load_index

# Below the usual limit of 1024 open files a process, with room for everything else.
MAX_OPEN_SHARDS = 256
# torch runs an element-wise operation in one thread below 32768 elements. Staying below keeps
# each loader thread from starting a pool of OpenMP threads of its own.
_SERIAL_ELEMENTS = 32768 - 1
_DTYPES = {2: np.dtype("<f2"), 4: np.dtype("<f4")}


def open_dataset(path: str, latent_channels: int = 128) -> "Dataset":
    """Open the shards at ``path`` and make indexes where none are stored.

    Args:
        path: a folder (its ``*.tar``, sorted by name, not below), one ``.tar`` file or a glob.
        latent_channels: width C that every stored array must have.

    Raises:
        InputError: nothing there, a damaged shard, or arrays of another width.
    """
    tar_paths = _find_shards(path)
    # Threads for what waits on a remote disk; parsing itself holds the interpreter.
    with ThreadPoolExecutor(min(8, len(tar_paths)), thread_name_prefix="index") as pool:
        indexes = list(pool.map(load_index, tar_paths))
    for tar_path, index in zip(tar_paths, indexes, strict=True):
        if index.channels != latent_channels:
            raise InputError(
                f"{tar_path}: its arrays are {index.channels} wide (first sample '{index.key(0)}') "
                f"where data.latent_channels is {latent_channels}; set it to {index.channels} or "
                "use another archive."
            )
    return Dataset(tar_paths, indexes)


def _find_shards(path: str) -> list[str]:
    if not path:
        raise InputError(
            "data.path is empty; set it to a folder of .tar shards, one .tar file or a glob."
        )
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        names = [
            name
            for name in os.listdir(expanded)
            if name.endswith(".tar") and not name.startswith(".")
        ]
        found = [os.path.join(expanded, name) for name in sorted(names)]
        if not found:
            raise InputError(
                f"data.path '{path}' is a folder without a .tar file; point it at the folder of "
                "shards."
            )
    elif os.path.isfile(expanded):
        if not expanded.endswith(".tar"):
            raise InputError(
                f"data.path '{path}' is a file that does not end in .tar; shards are plain .tar "
                "files."
            )
        found = [expanded]
    elif glob.has_magic(expanded):
        matches = [
            match
            for match in glob.glob(expanded)
            if match.endswith(".tar") and os.path.isfile(match)
        ]
        found = sorted(matches, key=lambda match: (os.path.basename(match), match))
        if not found:
            raise InputError(f"data.path '{path}' matches no .tar file; check the pattern.")
    else:
        raise InputError(
            f"data.path '{path}' does not exist; set it to a folder of .tar shards, one .tar file "
            "or a glob."
        )
    names = [os.path.basename(tar_path) for tar_path in found]
    for first, second, name in zip(found, found[1:], names[1:]):
        if os.path.basename(first) == name:
            raise InputError(
                f"data.path '{path}' holds two shards named '{name}' ({first} and {second}); "
                "sample ids are made of shard names, so rename one."
            )
    return [os.path.abspath(tar_path) for tar_path in found]


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
        found = os.fstat(self.descriptor).st_size
        if found != expected_bytes:
            raise InputError(
                f"{tar_path}: has {found} bytes where its index was made from {expected_bytes}; "
                "shards must not change during a run, so start again."
            )

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class Dataset:
    """All samples of some shards, numbered from 0 in order of shards and of members.

    Columns, numpy arrays of one row a sample: ``shard`` (number of its shard),
    ``frames`` and ``reference_frames`` (25 a second by default), ``text_bytes`` (utf-8
    length of the text), and the offsets of ``index.COLUMNS``.

    Reads may come from any thread. A pickled copy opens its own files.
    """

    def __init__(self, tar_paths: Sequence[str], indexes: Sequence[ShardIndex]):
        self.tar_paths = list(tar_paths)
        self.latent_channels = indexes[0].channels
        self._indexes = list(indexes)
        lengths = [len(index) for index in indexes]
        self._first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.shard = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)

        def column(name: str) -> np.ndarray:
            return np.concatenate([index.columns[name] for index in indexes])

        self.frames = column("frames")
        self.reference_frames = column("reference_frames")
        self.text_bytes = column("text_bytes")
        self._latents_offset = column("latents_offset")
        self._reference_offset = column("reference_offset")
        self._metadata_offset = column("metadata_offset")
        self._metadata_bytes = column("metadata_bytes")
        self._latents_item_bytes = column("latents_item_bytes")
        self._reference_item_bytes = column("reference_item_bytes")

        digest = hashlib.sha256()
        for tar_path, index in zip(tar_paths, indexes, strict=True):
            digest.update(
                _shard_name(tar_path).encode("utf-8", "surrogateescape") + b"\0" + index.digest
            )
        # Names and contents, no times and no folders: a copied dataset is the same dataset.
        self.fingerprint: str = digest.hexdigest()[:16]
        self._open_files()

    def _open_files(self) -> None:
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._files_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_files", "_files_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_files()

    def __len__(self) -> int:
        return len(self.frames)

    def sample_id(self, sample: int) -> str:
        """``shard:key``, the shard being the tar's file name without ``.tar``."""
        shard = int(self.shard[sample])
        key = self._indexes[shard].key(int(sample - self._first[shard]))
        return f"{_shard_name(self.tar_paths[shard])}:{key}"

    def read(
        self,
        sample: int,
        latents_out: np.ndarray | None = None,
        reference_out: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read both arrays of a sample into the first rows of the given buffers.

        Args:
            latents_out: C-contiguous (>= frames, C) float16 or float32; made as float32 if None.
            reference_out: the same for the reference, which is cropped to the buffer's rows.

        Returns:
            The filled parts: latents (frames, C) and reference (<= reference frames, C).
        """
        file = self._file(int(self.shard[sample]))
        channels = self.latent_channels
        frames, reference_frames = int(self.frames[sample]), int(self.reference_frames[sample])
        if latents_out is None:
            latents_out = np.empty((frames, channels), np.float32)
        if reference_out is None:
            reference_out = np.empty((reference_frames, channels), np.float32)
        if len(latents_out) < frames:
            raise InputError(
                f"sample '{self.sample_id(sample)}' has {frames} frames but its buffer has "
                f"{len(latents_out)}; utterances are never cropped."
            )
        latents_out = latents_out[:frames]
        reference_out = reference_out[:reference_frames]
        for out, offset, item_bytes in (
            (latents_out, self._latents_offset[sample], self._latents_item_bytes[sample]),
            (reference_out, self._reference_offset[sample], self._reference_item_bytes[sample]),
        ):
            dtype = _DTYPES[int(item_bytes)]
            # float16 is read as it is and widened in one pass over a buffer that stays in cache.
            target = out if out.dtype == dtype else np.empty(out.shape, dtype)
            self._read_bytes(file, sample, target, int(offset))
            if target is not out:
                _widen(target, out)
        return latents_out, reference_out

    def metadata(self, sample: int) -> dict[str, Any]:
        """The sample's JSON object; ``["text"]`` is always a string."""
        data = bytearray(int(self._metadata_bytes[sample]))
        file = self._file(int(self.shard[sample]))
        self._read_bytes(file, sample, data, int(self._metadata_offset[sample]))
        return json.loads(data)

    def _file(self, shard: int) -> _OpenFile:
        with self._files_lock:
            file = self._files.get(shard)
            if file is None:
                file = _OpenFile(self.tar_paths[shard], self._indexes[shard].tar_bytes)
                self._files[shard] = file
                if len(self._files) > MAX_OPEN_SHARDS:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(shard)
            return file

    def _read_bytes(
        self, file: _OpenFile, sample: int, target: np.ndarray | bytearray, offset: int
    ) -> None:
        view = memoryview(target).cast("B") if len(target) else memoryview(b"")
        while len(view):
            count = os.preadv(file.descriptor, [view], offset)
            if count == 0:
                raise InputError(
                    f"sample '{self.sample_id(sample)}': its shard ends before the sample does, so "
                    "it changed during the run; restore the shard and start again."
                )
            view, offset = view[count:], offset + count


def _widen(source: np.ndarray, out: np.ndarray) -> None:
    """Copy (n, C) between float16 and float32; torch converts 20 times faster than numpy."""
    source_tensor, out_tensor = torch.from_numpy(source), torch.from_numpy(out)
    if out.size <= _SERIAL_ELEMENTS or torch.get_num_threads() == 1:
        out_tensor.copy_(source_tensor)
        return
    rows = max(1, _SERIAL_ELEMENTS // out.shape[1])
    for start in range(0, len(out), rows):
        out_tensor[start : start + rows].copy_(source_tensor[start : start + rows])


def _shard_name(tar_path: str) -> str:
    return os.path.basename(tar_path).removesuffix(".tar")
