"""A bounded cache of byte extents on disk, shared by processes, any of which may be killed.

For each tar the folder holds two files, named by a digest of the tar's URL, size and version:

    DIGEST.data   as long as the tar, sparse: cached bytes are at the same offsets as in the tar
    DIGEST.log    one record of 24 bytes per extent: start, stop, xxh3_64 of the bytes

and `titan-tts-cache.usage`, the number of bytes that the folder takes, beside the lock of all writing.
Other files there are left alone. Readers take no lock: an extent whose bytes do not match their hash
counts as absent, whatever a kill, another process or the disk did.

The usage is raised before bytes are written and corrected afterwards, so a kill leaves it too high; it
is recounted from the files when a process first writes and whenever space is needed. Then the tars that
were not used for longest are removed.
"""

import logging
import os
import re
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from torchtitan.models.dit_tts.data.remote import Extent, shown

logger = logging.getLogger(__name__)

RECORD = np.dtype([("start", "<u8"), ("stop", "<u8"), ("hash", "<u8")])
# How exact the order of use is; a touch is a write to the file's inode.
TOUCH_SECONDS = 5.0
# Part of the limit that is freed beyond what is needed, so that not every write has to.
_SPARE_FRACTION = 0.05
_LOCK_SECONDS = 10.0
_BLOCK_BYTES = 4096
_MERGE_RECORDS = 256
_OURS = re.compile(r"([0-9a-f]{32})\.(data|log)")
_USAGE_NAME = "titan-tts-cache.usage"


class DiskCache:
    """Extents in `folder`, which takes at most `limit_bytes` of disk, or one write more.

    Any thread may call. No method fails: where the folder cannot be used a warning is logged
    once and nothing more is written.
    """

    def __init__(self, folder: str, limit_bytes: int):
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self.limit_bytes = limit_bytes
        self._tars: OrderedDict[str, _CachedTar] = OrderedDict()
        # Two descriptors each: a quarter of what the process may have, 128 tars by the usual default.
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open_tars = min(max(descriptors, 0) // 8, 1024) or 1024
        self._tars_lock = threading.Lock()
        # Threads wait for one another here; only one of a process polls for the file's lock.
        self._writing = threading.Lock()
        lock = os.path.join(self.folder, "titan-tts-cache.lock")
        self._lock = FileLock(lock, mode=0o666, thread_local=False, poll_interval=0.002)
        self._has_counted = False
        self._stopped = False
        self._warned_of_corruption = False

    def read(self, extent: Extent) -> bytes | None:
        """The extent's bytes, or None where they are not there complete and valid."""
        try:
            tar = self._tar(extent, create=False)
            if tar is None:
                return None
            data, is_corrupt = tar.read(extent.start, extent.stop)
        except OSError as error:
            self._stop(error)
            return None
        if is_corrupt and not self._warned_of_corruption and tar.is_linked():
            self._warned_of_corruption = True
            logger.warning(
                "%s: cached bytes of %s are corrupt and are read from there again; check the disk",
                self.folder,
                shown(extent.path),
            )
        return data

    def write(self, items: Sequence[tuple[Extent, bytes]]) -> None:
        """Cache the bytes of some extents, as far as they fit into the limit."""
        if self._stopped:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            with self._writing, self._lock.acquire(_LOCK_SECONDS):
                self._write(items)
        except Timeout:
            pass  # a stopped process may hold it for ever, and a cache may miss a write
        except OSError as error:
            self._stop(error)

    def forget(self, extent: Extent) -> None:
        """The extent's bytes are wrong although they match their hash."""
        try:
            tar = self._tar(extent, create=False)
            if tar is not None:
                tar.drop(extent.start, extent.stop)  # for this process, whatever the disk does
                with self._writing, self._lock.acquire(_LOCK_SECONDS):
                    tar.append([(extent.start, extent.stop, 0)])
        except Timeout:
            pass
        except OSError as error:
            self._stop(error)

    def _write(self, items: Sequence[tuple[Extent, bytes]]) -> None:
        by_tar: dict[str, list[tuple[Extent, bytes]]] = {}
        needed = 0
        for extent, data in items:
            blocks = -(-extent.stop // _BLOCK_BYTES) - extent.start // _BLOCK_BYTES
            item_bytes = (blocks + 1) * _BLOCK_BYTES  # one for its part of the log
            if needed + item_bytes <= self.limit_bytes:
                by_tar.setdefault(_stem(extent), []).append((extent, data))
                needed += item_bytes
        used = self._read_usage()
        if not self._has_counted or used + needed > self.limit_bytes:
            used = self._make_room(needed)
            self._has_counted = True
        self._write_usage(used + needed)
        for tar_items in by_tar.values():
            tar = self._tar(tar_items[0][0], create=True)
            assert tar is not None
            used += tar.write(tar_items)
        self._write_usage(used)

    def _read_usage(self) -> int:
        try:
            with open(os.path.join(self.folder, _USAGE_NAME), "rb") as file:
                return int.from_bytes(file.read(8), "little")
        except FileNotFoundError:
            self._has_counted = False  # somebody emptied the folder
            return 0

    def _write_usage(self, used: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(os.path.join(self.folder, _USAGE_NAME), flags, 0o666)
        try:
            os.pwrite(descriptor, used.to_bytes(8, "little"), 0)
        finally:
            os.close(descriptor)

    def _make_room(self, needed: int) -> int:
        """Remove tars until `needed` bytes fit; the bytes that remain."""
        sizes: dict[str, int] = {}
        last_use: dict[str, int] = {}
        used = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                ours = _OURS.fullmatch(entry.name)
                if ours is None and entry.name != _USAGE_NAME:
                    continue
                found = entry.stat(follow_symlinks=False)
                used += found.st_blocks * 512
                if ours is not None:
                    stem = ours[1]
                    sizes[stem] = sizes.get(stem, 0) + found.st_blocks * 512
                    # The log is touched at every use; data without one is an unfinished removal.
                    used_at = found.st_mtime_ns if ours[2] == "log" else 0
                    last_use[stem] = max(used_at, last_use.get(stem, 0))
        if used + needed <= self.limit_bytes:
            return used
        goal = max(0, int(self.limit_bytes * (1 - _SPARE_FRACTION)) - needed)
        for stem in sorted(sizes, key=lambda stem: (last_use[stem], stem)):
            if used <= goal:
                break
            self._remove(stem)
            used -= sizes[stem]
        return used

    def _remove(self, stem: str) -> None:
        path = os.path.join(self.folder, stem)
        for suffix in (".log", ".data"):
            try:
                # Others may have it open: a cut frees the disk although they do.
                os.truncate(path + suffix, 0)
                os.unlink(path + suffix)
            except FileNotFoundError:
                pass

    def _tar(self, extent: Extent, create: bool) -> "_CachedTar | None":
        stem = _stem(extent)
        with self._tars_lock:
            tar = self._tars.get(stem)
            if tar is not None and tar.is_linked():
                self._tars.move_to_end(stem)
                return tar
            self._tars.pop(stem, None)
            try:
                tar = _CachedTar(os.path.join(self.folder, stem), extent.size, create)
            except FileNotFoundError:
                if create:
                    raise
                return None
            self._tars[stem] = tar
            if len(self._tars) > self._max_open_tars:
                self._tars.popitem(last=False)
            return tar

    def _stop(self, error: OSError) -> None:
        if not self._stopped:
            self._stopped = True
            logger.warning(
                "%s: cannot be used as a cache (%s); reading continues, and nothing more is cached",
                self.folder,
                error.strerror or error,
            )


class _CachedTar:
    """The two files of one tar, closed when the last reader lets go of them."""

    def __init__(self, path: str, size: int, create: bool):
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self.data = os.open(path + ".data", flags, 0o666)
        weakref.finalize(self, os.close, self.data)
        self.log = os.open(path + ".log", flags, 0o666)
        weakref.finalize(self, os.close, self.log)
        if create and os.fstat(self.data).st_size != size:
            os.ftruncate(self.log, 0)  # of data that are gone
            # At its full length from the start: some filesystems reserve space behind a file that
            # grows, and that would count.
            os.ftruncate(self.data, size)
        self._lock = threading.Lock()
        self._records = _Records()
        self._read_bytes = 0
        self._touched = 0.0

    def is_linked(self) -> bool:
        """False once another process has removed one of the files."""
        return bool(os.fstat(self.data).st_nlink and os.fstat(self.log).st_nlink)

    def read(self, start: int, stop: int) -> tuple[bytes | None, bool]:
        """(the bytes, or None; whether there is a record that they do not match)."""
        with self._lock:
            self._catch_up()
            expected = self._records.get(start, stop)
        if expected == 0:
            return None, False
        data = os.pread(self.data, stop - start, start)
        if len(data) != stop - start or xxhash.xxh3_64_intdigest(data) != expected:
            with self._lock:
                self._records.drop(start, stop)
            return None, True
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            os.utime(self.log)
        return data, False

    def write(self, items: Sequence[tuple[Extent, bytes]]) -> int:
        """Store extents under the folder's lock; the bytes of disk that this took."""
        before = self._disk_bytes()
        records, written = [], 0
        with self._lock:
            self._catch_up()
            known = [self._records.get(extent.start, extent.stop) for extent, _ in items]
        for (extent, data), hash_known in zip(items, known, strict=True):
            content_hash = xxhash.xxh3_64_intdigest(data)
            if hash_known == content_hash:
                continue  # another thread or process was first
            _write_all(self.data, data, extent.start)
            records.append((extent.start, extent.stop, content_hash))
            written += len(data)
        self.append(records)
        # Some filesystems count blocks only when they come to write them.
        return max(written, self._disk_bytes() - before)

    def drop(self, start: int, stop: int) -> None:
        with self._lock:
            self._catch_up()
            self._records.drop(start, stop)

    def append(self, records: Sequence[tuple[int, int, int]]) -> None:
        """Write records (start, stop, hash) under the folder's lock; hash 0 forgets an extent."""
        size = os.fstat(self.log).st_size
        end = size - size % RECORD.itemsize  # over what a kill or a full disk left of a record
        _write_all(self.log, np.array(records, RECORD).tobytes(), end)

    def _catch_up(self) -> None:
        """Take in what any process has appended since."""
        size = os.fstat(self.log).st_size
        if size < self._read_bytes:
            self._records, self._read_bytes = _Records(), 0
        count = (size - self._read_bytes) // RECORD.itemsize
        if count:
            data = os.pread(self.log, count * RECORD.itemsize, self._read_bytes)
            data = data[: len(data) - len(data) % RECORD.itemsize]
            self._records.add(np.frombuffer(data, RECORD))
            self._read_bytes += len(data)

    def _disk_bytes(self) -> int:
        return 512 * (os.fstat(self.data).st_blocks + os.fstat(self.log).st_blocks)


class _Records:
    """Hash of each extent: 32 bytes per record, sorted by start, and a dictionary for the latest."""

    def __init__(self):
        self._sorted = np.empty(0, RECORD)
        self._start = np.empty(0, np.uint64)  # a search in a column of records would copy it
        self._latest: dict[tuple[int, int], int] = {}

    def get(self, start: int, stop: int) -> int:
        """0 where there is none."""
        latest = self._latest.get((start, stop))
        if latest is not None:
            return latest
        row = int(np.searchsorted(self._start, np.uint64(start), side="right")) - 1
        while row >= 0 and self._start[row] == start:  # of equal extents the newest comes last
            if self._sorted["stop"][row] == stop:
                return int(self._sorted["hash"][row])
            row -= 1
        return 0

    def drop(self, start: int, stop: int) -> None:
        self._latest[start, stop] = 0

    def add(self, records: np.ndarray) -> None:
        """Take in records of dtype `RECORD`, which replace all before them."""
        if len(self._latest) + len(records) < max(_MERGE_RECORDS, len(self._start) // 8):
            self._latest |= {tuple(extent): digest for *extent, digest in records.tolist()}
            return
        latest = [(*extent, digest) for extent, digest in self._latest.items()]
        rows = np.concatenate([self._sorted, np.array(latest, RECORD), records])
        self._sorted = rows[np.argsort(rows["start"], kind="stable")]
        self._start = self._sorted["start"].copy()
        self._latest = {}


def _stem(extent: Extent) -> str:
    identity = f"{shown(extent.path)}\0{extent.size}\0{extent.version}"
    return xxhash.xxh3_128_hexdigest(identity.encode("utf-8", "surrogateescape"))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
