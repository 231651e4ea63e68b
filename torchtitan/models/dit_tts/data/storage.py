"""Storage of shards, and reading of their bytes: a local disk or any store that fsspec knows.

>>> find_shards("s3://corpus/train-{000000..000002}.tar")
['s3://corpus/train-000000.tar', 's3://corpus/train-000001.tar', 's3://corpus/train-000002.tar']
>>> header = open_source("/data/train/shard-000000.tar").pread(512, 0)

A remote source reads a tar once from front to back; `range_reader` reads samples in any order.
"""

import glob
import os
import stat
import weakref
from typing import Protocol
from urllib.parse import urlsplit

from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.range_reader import Extent, RangeReader
from torchtitan.models.dit_tts.errors import LEFT_OUT, InputError
from torchtitan.models.dit_tts.files import (
    SHARD_SUFFIX,
    expand_braces,
    is_remote,
    local_path,
    matching_shards,
    shards_in,
)

READ_AHEAD_BYTES = 4 << 20

_KINDS = "a folder of .tar shards, one such file, a glob, a pattern with braces or a URL"


class ShardFile(Protocol):
    """The bytes of one tar, for any thread: `path` (absolute local path or URL), `size` in bytes, and a `version` that
    changes with the content (modification time in ns; of a remote tar as of `remote.Stat`)."""

    path: str
    size: int
    version: int

    def pread(self, size: int, offset: int) -> bytes:
        """`size` bytes from `offset`; fewer only at the end of the tar."""
        ...

    def close(self) -> None:
        """Let go of the file or connection; no reads after it."""


def plain_name(path: str) -> str:
    """The path as it names a tar in ids, messages and caches: a URL without its password and query."""
    return remote.shown(path) if is_remote(path) else path


def shard_name(tar_path: str) -> str:
    return os.path.basename(plain_name(tar_path)).removesuffix(SHARD_SUFFIX)


def shard_names(tar_paths: list[str]) -> list[str]:
    """File names without `.tar`, after as few parent folders as make each name unique."""
    parts = [plain_name(path).removesuffix(SHARD_SUFFIX).split("/") for path in tar_paths]
    depth = 1
    while len(set(names := ["/".join(part[-depth:]) for part in parts])) < len(parts):
        depth += 1
    return names


def sidecar_path(path: str) -> str:
    """Path of the index next to a tar: `.idx` after the name, before a URL's query."""
    name, question, query = path.partition("?") if is_remote(path) else (path, "", "")
    return name + ".idx" + question + query


def open_source(path: str) -> ShardFile:
    """Open one tar."""
    return RemoteSource(path) if is_remote(path) else LocalSource(local_path(path))


class UnreadableError(InputError):
    """Bytes that a disk cannot read."""


class LocalSource:
    """A tar on a mounted filesystem; reads go straight to the descriptor, without a position."""

    def __init__(self, path: str):
        self.path = path
        try:
            # A FIFO would hold up an ordinary open for ever.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InputError(f"{path}: cannot be opened ({error.strerror})") from None
        self._close = weakref.finalize(self, os.close, self.descriptor)
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path}: is not a regular file")
        self.size, self.version = found.st_size, found.st_mtime_ns

    def pread(self, size: int, offset: int) -> bytes:
        parts = []
        try:
            # One read brings at most 2 GiB.
            while offset < self.size and (part := os.pread(self.descriptor, size, offset)):
                parts.append(part)
                size, offset = size - len(part), offset + len(part)
        except OSError as error:
            raise UnreadableError(
                f"{self.path}: cannot be read at byte {offset} ({error.strerror}); restore the shard"
            ) from None
        return b"".join(parts)  # without a copy where it is one part, as nearly always

    def close(self) -> None:
        self._close()


class RemoteSource:
    """A tar behind a URL, read from front to back in blocks: while one is used the next is under way."""

    def __init__(self, path: str, read_ahead_bytes: int = READ_AHEAD_BYTES):
        from fsspec.caching import BackgroundBlockCache

        self.path = path
        self.size, self.version = remote.stat(path)
        self._reader = RangeReader(max_in_flight=4)
        # Its blocks are fetched by our client: fsspec's own does not try again, and takes a tar
        # that changes or a server that ignores ranges for data.
        self._cache = BackgroundBlockCache(read_ahead_bytes, self.fetch, self.size, maxblocks=3)

    def pread(self, size: int, offset: int) -> bytes:
        return self._cache._fetch(offset, offset + size)

    def close(self) -> None:
        self._reader.close()
        if hasattr(self._cache, "close"):  # older versions of fsspec have none
            self._cache.close()

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) by a request of their own, as far as the tar has them."""
        stop = min(stop, self.size)
        extent = Extent(self.path, self.size, self.version, start, stop)
        return self._reader.fetch([extent])[0]


def find_shards(path: str) -> list[str]:
    """The shards that one entry of `[data] path` stands for: absolute paths or URLs, sorted by (file name, complete
    path).

    Args:
        path: a folder (its `*.tar`, not below), one of them, a glob, or a pattern such as
            `shard-{000000..000099}.tar`; locally or as a URL. The store of a folder's URL must be able to list.
    """
    if not path:
        raise InputError(f"[data] path is empty; set it to {_KINDS}")
    if is_remote(path) and LEFT_OUT in path:
        raise InputError(
            f"[data] path '{path}' has {LEFT_OUT} in place of a possible secret; give the complete URL"
        )
    if is_remote(path):
        try:
            urlsplit(path)
        except ValueError as error:
            raise InputError(f"[data] path '{path}' is not a URL ({error}); correct it") from None
    found = []
    for piece in expand_braces(path):
        shards = _find_remote(piece) if is_remote(piece) else _find_local(piece)
        if not shards:
            origin = "" if piece == path else f" (of '{path}')"
            raise InputError(
                f"[data] path '{piece}'{origin} matches no {SHARD_SUFFIX} file; {_instead(piece)}"
            )
        found += shards
    return sorted(found, key=lambda shard: (os.path.basename(shard), shard))


def _instead(piece: str) -> str:
    """Return the advice for an entry without shards."""
    if not is_remote(piece) and os.path.isdir(local_path(piece)):
        below = matching_shards(os.path.join(glob.escape(local_path(piece)), "*", "*"))
        if folders := sorted({os.path.dirname(tar) for tar in below}, reverse=True):
            return f"folders in it have some, so give {' or '.join(folders)}"
    if "spoken_digits" in piece:
        return "scripts/from_scratch.sh prepares the spoken digits, in the repository"
    return f"set it to {_KINDS}, as titan-tts prepare SOURCE OUTPUT makes them of recordings or Parquet files"


def _find_local(piece: str) -> list[str]:
    path = local_path(piece)
    return shards_in(path) if os.path.isdir(path) else matching_shards(path)


def _find_remote(piece: str) -> list[str]:
    is_http = piece.startswith(("http://", "https://"))
    # A query of http (a signature, a version) belongs to no file name.
    url_path = urlsplit(piece).path if is_http else piece.split("://", 1)[1]
    is_pattern = glob.has_magic(url_path)
    if url_path.endswith(SHARD_SUFFIX) and not is_pattern:
        return [piece]  # it is asked for when it is opened
    store, path = remote.filesystem(piece)
    store.invalidate_cache()  # a listing from an earlier call may be out of date
    if is_pattern:
        names = remote.call(piece, "listed", lambda: store.glob(path))
    else:
        entries = remote.call(piece, "listed", lambda: store.ls(path, detail=True))
        names = [entry["name"] for entry in entries if entry["type"] != "directory"]
        # Web pages also link to what lies elsewhere.
        names = [name for name in names if name.rpartition("/")[0].strip("/") == path.strip("/")]
    # A hidden file is somebody's unfinished or foreign one.
    shown = [name for name in names if not name.rpartition("/")[2].startswith(".")]
    return urls_of(piece, [name for name in shown if name.endswith(SHARD_SUFFIX)])


def urls_of(url: str, names: list[str]) -> list[str]:
    """The URLs of what a store listed for a URL or a glob of one."""
    if url.startswith(("http://", "https://")):
        return names  # URLs already
    store, path = remote.filesystem(url)
    # The URL's own scheme and host: not every store has its host in its names, as ftp and hdfs.
    scheme, _, rest = url.partition("://")
    host, _, below = rest.partition("/")
    if glob.has_magic(host):
        return [store.unstrip_protocol(name) for name in names]
    in_names = path.strip("/").removesuffix(below.strip("/"))
    names = [name.lstrip("/").removeprefix(in_names).lstrip("/") for name in names]
    return [f"{scheme}://{host}/{name}" for name in names]
