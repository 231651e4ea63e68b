"""Samples of remote tars in any order: many range requests at once, and a bounded cache on disk.

>>> reader = RangeReader("/scratch/cache", cache_bytes=16 << 30)
>>> header, = reader.fetch([Extent("s3://corpus/000000.tar", size, version, start=0, stop=512)])

The cache is shared by processes, any of which may be killed.

For each tar the folder holds two files, named by a digest of the tar's URL, size and version:

    DIGEST.data      as long as the tar, sparse: cached bytes are at the same offsets as in the tar
    DIGEST.extents   one record of 16 bytes per extent: start, stop; -stop for one that was forgotten

Other files there are left alone. All writing is under one lock; readers take none. An extent is recorded
after its bytes are written. What the disk or a power cut corrupted is known to the reader, who has the
hash of every sample and forgets what does not match.

A process counts what the folder takes before its first write and again after every few writes. Where space
is needed, the tars that were not used for longest are removed.
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

from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.remote import Extent, shown

logger = logging.getLogger(__name__)

RECORD_BYTES = 16
# How exact the order of use is; a touch is a write to the file's inode.
TOUCH_SECONDS = 5.0
# Part of the limit that is left free for what other processes write between two counts.
_SPARE_FRACTION = 0.05
_COUNTS_PER_SPARE = 16
_LOCK_SECONDS = 10.0
_BLOCK_BYTES = 4096
_MERGE_RECORDS = 256
_OURS = re.compile(r"([0-9a-f]{32})\.(data|extents)")


class RangeReader:
    """Reads extents of remote tars; any number of threads may do so at once.

    Args:
        cache_folder: where read bytes are kept; None: nowhere.
        cache_bytes: maximum disk that the folder takes; 0: nothing is kept.
        max_in_flight: maximum requests that wait for servers at once, over all threads.
    """

    def __init__(self, cache_folder: str | None, cache_bytes: int, max_in_flight: int = 64):
        self._client = remote.RangeClient(max_in_flight)
        self._cache = DiskCache(cache_folder, cache_bytes) if cache_folder and cache_bytes else None
        self._suspects: set[str] = set()

    def fetch(self, extents: Sequence[Extent]) -> list[bytes]:
        """The bytes of each extent, in order: from the cache, or else requested all at once."""
        found: dict[Extent, bytes] = {}
        missing: list[Extent] = []
        for extent in dict.fromkeys(extents):
            assert 0 <= extent.start <= extent.stop <= extent.size
            data = b"" if extent.start == extent.stop else None
            if data is None and self._cache is not None:
                data = self._cache.read(extent)
            if data is None:
                missing.append(extent)
            else:
                found[extent] = data
        if missing:
            self._check_suspects(missing)
            fetched = list(zip(missing, self._client.fetch(missing), strict=True))
            if self._cache is not None:
                self._cache.write(fetched)
            found.update(fetched)
        return [found[extent] for extent in extents]

    def forget(self, extent: Extent) -> None:
        """Its bytes are not what they should be: the next fetch asks the server again, and first
        whether the tar is still the same."""
        if self._cache is not None:
            self._cache.forget(extent)
        self._suspects.add(extent.path)

    def _check_suspects(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            if extent.path not in self._suspects:
                continue
            self._suspects.discard(extent.path)
            found = remote.stat(extent.path, fresh=True)
            other_version = extent.version and found.version != extent.version
            if found.size != extent.size or other_version:
                raise remote.changed(extent, found.size)


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
        self._spare_bytes = int(limit_bytes * _SPARE_FRACTION)
        self._uncounted_bytes = limit_bytes
        self._stopped = False
        self._warned_of_corruption = False

    def read(self, extent: Extent) -> bytes | None:
        """The extent's bytes, or None where they are not there complete and valid."""
        try:
            tar = self._tar(extent, create=False)
            return None if tar is None else tar.read(extent.start, extent.stop)
        except OSError as error:
            self._stop(error)
            return None

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
        """The extent's bytes are wrong."""
        try:
            tar = self._tar(extent, create=False)
            if tar is None or not tar.forget(extent.start, extent.stop):
                return
            if not self._warned_of_corruption:
                self._warned_of_corruption = True
                logger.warning(
                    "%s: cached bytes of %s are corrupt and are read from there again; if that helps, check the disk",
                    self.folder,
                    shown(extent.path),
                )
            with self._writing, self._lock.acquire(_LOCK_SECONDS):
                tar.append([(extent.start, -extent.stop)])
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
        if self._uncounted_bytes + needed > self._spare_bytes // _COUNTS_PER_SPARE:
            self._evict(needed)
            self._uncounted_bytes = 0
        for tar_items in by_tar.values():
            tar = self._tar(tar_items[0][0], create=True)
            assert tar is not None
            self._uncounted_bytes += tar.write(tar_items)

    def _evict(self, needed: int) -> None:
        """Remove tars, if `needed` bytes do not fit, until they do."""
        sizes: dict[str, int] = {}
        last_use: dict[str, int] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if (ours := _OURS.fullmatch(entry.name)) is None:
                    continue
                found, stem = entry.stat(follow_symlinks=False), ours[1]
                sizes[stem] = sizes.get(stem, 0) + found.st_blocks * 512
                # The extents are touched at every use; data without them are an unfinished removal.
                used_at = found.st_mtime_ns if ours[2] == "extents" else 0
                last_use[stem] = max(used_at, last_use.get(stem, 0))
        used, limit = sum(sizes.values()), self.limit_bytes - self._spare_bytes - needed
        if used <= limit:
            return
        goal = max(0, limit - self._spare_bytes)  # so that not every write has to remove
        for stem in sorted(sizes, key=lambda stem: (last_use[stem], stem)):
            if used <= goal:
                break
            self._remove(stem)
            used -= sizes[stem]

    def _remove(self, stem: str) -> None:
        path = os.path.join(self.folder, stem)
        for suffix in (".extents", ".data"):
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
        self.extents = os.open(path + ".extents", flags, 0o666)
        weakref.finalize(self, os.close, self.extents)
        if create and os.fstat(self.data).st_size != size:
            os.ftruncate(self.extents, 0)  # of data that are gone
            # At its full length from the start: some filesystems reserve space behind a file that
            # grows, and that would count.
            os.ftruncate(self.data, size)
        self._lock = threading.Lock()
        self._records = _Records()
        self._read_bytes = 0
        self._touched = 0.0

    def is_linked(self) -> bool:
        """False once another process has removed one of the files."""
        return bool(os.fstat(self.data).st_nlink and os.fstat(self.extents).st_nlink)

    def read(self, start: int, stop: int) -> bytes | None:
        with self._lock:
            self._catch_up()
            if not self._records.has(start, stop):
                return None
        data = os.pread(self.data, stop - start, start)
        if len(data) != stop - start:  # removed by another process
            self.forget(start, stop)
            return None
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            os.utime(self.extents)
        return data

    def write(self, items: Sequence[tuple[Extent, bytes]]) -> int:
        """Store extents under the folder's lock; the bytes of disk that this took."""
        before = self._disk_bytes()
        with self._lock:
            self._catch_up()
            # Another thread or process may have been first.
            new = [each for each in items if not self._records.has(each[0].start, each[0].stop)]
        for extent, data in new:
            _write_all(self.data, data, extent.start)
        self.append([(extent.start, extent.stop) for extent, _ in new])
        # Some filesystems count blocks only when they come to write them.
        written = sum(len(data) for _, data in new)
        return max(written, self._disk_bytes() - before)

    def forget(self, start: int, stop: int) -> bool:
        """Whether the extent was there; for this process, whatever the disk does."""
        with self._lock:
            self._catch_up()
            was_there = self._records.has(start, stop)
            self._records.add(np.array([(start, -stop)]))
        return was_there

    def append(self, records: Sequence[tuple[int, int]]) -> None:
        """Write records under the folder's lock."""
        size = os.fstat(self.extents).st_size
        end = size - size % RECORD_BYTES  # over what a kill or a full disk left of a record
        _write_all(self.extents, np.array(records, "<i8").tobytes(), end)

    def _catch_up(self) -> None:
        """Take in what any process has appended since."""
        size = os.fstat(self.extents).st_size
        if size < self._read_bytes:
            self._records, self._read_bytes = _Records(), 0
        count = (size - self._read_bytes) // RECORD_BYTES
        if count:
            data = os.pread(self.extents, count * RECORD_BYTES, self._read_bytes)
            data = data[: len(data) - len(data) % RECORD_BYTES]
            self._records.add(np.frombuffer(data, "<i8").reshape(-1, 2))
            self._read_bytes += len(data)

    def _disk_bytes(self) -> int:
        return 512 * (os.fstat(self.data).st_blocks + os.fstat(self.extents).st_blocks)


class _Records:
    """Which extents are there: 16 bytes per record, sorted by start, and a dictionary for the latest."""

    def __init__(self):
        self._start = self._stop = np.empty(0, np.int64)
        self._latest: dict[tuple[int, int], bool] = {}

    def has(self, start: int, stop: int) -> bool:
        latest = self._latest.get((start, stop))
        if latest is not None:
            return latest
        row = int(np.searchsorted(self._start, start, side="right")) - 1
        while row >= 0 and self._start[row] == start:  # of equal extents the newest comes last
            if abs(self._stop[row]) == stop:
                return bool(self._stop[row] > 0)
            row -= 1
        return False

    def add(self, records: np.ndarray) -> None:
        """Take in records (n, 2) int64 of (start, stop or -stop), which replace all before them."""
        if len(self._latest) + len(records) < max(_MERGE_RECORDS, len(self._start) // 8):
            self._latest |= {(start, abs(stop)): stop > 0 for start, stop in records.tolist()}
            return
        latest = [
            (start, stop if is_there else -stop) for (start, stop), is_there in self._latest.items()
        ]
        both = np.concatenate([np.array(latest, np.int64).reshape(-1, 2), records])
        starts = np.concatenate([self._start, both[:, 0]])
        order = np.argsort(starts, kind="stable")
        self._start = starts[order]
        self._stop = np.concatenate([self._stop, both[:, 1]])[order]
        self._latest = {}


def _stem(extent: Extent) -> str:
    identity = f"{shown(extent.path)}\0{extent.size}\0{extent.version}"
    return xxhash.xxh3_128_hexdigest(identity.encode("utf-8", "surrogateescape"))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
