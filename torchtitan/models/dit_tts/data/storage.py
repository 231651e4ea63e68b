"""Where tars are and how their bytes are read: a local disk or any store that fsspec knows.

>>> find_shards("s3://corpus/train-{000000..000002}.tar")
['s3://corpus/train-000000.tar', 's3://corpus/train-000001.tar', 's3://corpus/train-000002.tar']
>>> source = open_source("/data/train/shard-000000.tar")
>>> header = source.pread(512, 0)

A remote source is made for reading a tar from front to back, once, as an index is built: it reads
ahead in a few large requests. Samples in any order are the work of ``range_cache``.
"""

import glob
import itertools
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol
from urllib.parse import urlsplit

from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote, local_path

READ_AHEAD_BYTES = 4 << 20

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MAX_EXPANDED = 1_000_000
_KINDS = "a folder of .tar shards, one .tar file, a glob, a pattern with braces or a URL"


class ShardFile(Protocol):
    """The bytes of one tar, for any thread.

    Attributes:
        path: absolute local path or URL.
        size: of the tar in bytes.
        version: changes with the content: the modification time in ns locally; of a remote tar
            a hash of its ETag or modification time, 0 where its store tells neither.
    """

    path: str
    size: int
    version: int

    def pread(self, size: int, offset: int) -> bytes:
        """``size`` bytes from ``offset``; fewer only at the end of the tar."""

    def pread_into(self, target: memoryview, offset: int) -> int:
        """Fill ``target``, a view of bytes; the number of bytes read, fewer only at the end."""

    def close(self) -> None:
        """Let go of the file or connection; no reads after it."""


def plain_name(path: str) -> str:
    """The path as it names a tar in ids, messages and caches: a URL without its password and query,
    as a signature is another one each day."""
    return remote.shown(path) if is_remote(path) else path


def sidecar_path(path: str) -> str:
    """Where the index beside a tar lies: ``.idx`` after the name, before a URL's query."""
    name, question, query = path.partition("?") if is_remote(path) else (path, "", "")
    return name + ".idx" + question + query


def open_source(path: str) -> ShardFile:
    """Open one tar.

    Raises:
        InputError: not there, no rights, unreachable, or a server without range requests.
    """
    return RemoteSource(path) if is_remote(path) else LocalSource(local_path(path))


class LocalSource:
    """A tar on a mounted filesystem; reads go straight to the descriptor and share no state."""

    def __init__(self, path: str):
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be opened ({error.strerror}); check the path and its rights."
            ) from None
        self._close = weakref.finalize(self, os.close, self.descriptor)
        found = os.fstat(self.descriptor)
        self.size, self.version = found.st_size, found.st_mtime_ns

    def pread(self, size: int, offset: int) -> bytes:
        size = max(0, min(size, self.size - offset))
        data = bytearray(size)
        count = self.pread_into(memoryview(data), offset)
        return bytes(data) if count == size else bytes(data[:count])

    def pread_into(self, target: memoryview, offset: int) -> int:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise InputError(
                    f"{self.path}: cannot be read at byte {offset + done} ({error.strerror}); "
                    "check the disk and restore the shard."
                ) from None
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        self._close()


class RemoteSource:
    """A tar behind a URL, read from front to back in blocks of ``read_ahead_bytes``.

    While a block is used the next one is under way; the last three are kept.
    """

    def __init__(self, path: str, read_ahead_bytes: int = READ_AHEAD_BYTES):
        self.path = path
        self.size, self.version = remote.stat(path)
        self._block_bytes = read_ahead_bytes
        self._client = remote.RangeClient(max_in_flight=4)
        self._blocks: dict[int, Future[list[bytes]]] = {}
        self._lock = threading.Lock()

    def pread(self, size: int, offset: int) -> bytes:
        size = max(0, min(size, self.size - offset))
        first = offset // self._block_bytes
        last = (offset + size - 1) // self._block_bytes
        if size and first == last:  # without a second copy
            start = offset - first * self._block_bytes
            return self._block(first)[start : start + size]
        data = bytearray(size)
        self.pread_into(memoryview(data), offset)
        return bytes(data)

    def pread_into(self, target: memoryview, offset: int) -> int:
        size = max(0, min(len(target), self.size - offset))
        done = 0
        while done < size:
            number, start = divmod(offset + done, self._block_bytes)
            part = memoryview(self._block(number))[start : start + size - done]
            target[done : done + len(part)] = part
            done += len(part)
        return done

    def close(self) -> None:
        with self._lock:
            for future in self._blocks.values():
                future.cancel()
            self._blocks.clear()
        self._client.close()

    def _block(self, number: int) -> bytes:
        with self._lock:
            # A jump (over a member that nobody needs) makes no use of what follows.
            sequential = number == 0 or number in self._blocks or number - 1 in self._blocks
            for wanted in (number, number + 1) if sequential else (number,):
                start = wanted * self._block_bytes
                if wanted not in self._blocks and start < self.size:
                    stop = min(start + self._block_bytes, self.size)
                    block = remote.Extent(self.path, self.size, self.version, start, stop)
                    self._blocks[wanted] = self._client.submit([block])
            for old in [have for have in self._blocks if not number - 1 <= have <= number + 1]:
                del self._blocks[old]
            future = self._blocks[number]
        return future.result()[0]


def check_url(path: str) -> None:
    """Raises InputError where a path with a scheme cannot be taken apart."""
    try:
        urlsplit(path if _SCHEME.match(path) else "")
    except ValueError as error:
        raise InputError(f"data.path '{path}' is no URL ({error}); mend it.") from None


def find_shards(path: str) -> list[str]:
    """The shards that one entry of ``data.path`` stands for, sorted by name.

    Args:
        path: a folder (its ``*.tar``, not below), one ``.tar``, a glob, or a pattern such as
            ``shard-{000000..000099}.tar``; locally or as a URL. A folder URL needs a store that
            can list (S3, a web server with an index page).

    Returns:
        Absolute paths or URLs, sorted by (file name, whole path).

    Raises:
        InputError: nothing there, a file missing of those that a pattern names, one named twice.
    """
    if not path:
        raise InputError(f"data.path is empty; set it to {_KINDS}.")
    check_url(path)
    pieces = _expand_braces(path)
    if pieces is None:
        found = _find_piece(path, f"data.path '{path}'")
    else:
        _check_all_there(path, pieces)
        found = []
        for piece in pieces:
            if _is_plain_tar(piece):
                found.append(piece if is_remote(piece) else local_path(piece))
            else:
                found += _find_piece(piece, f"data.path '{path}' expands to '{piece}', which")
    found.sort(key=lambda shard: (os.path.basename(shard), shard))
    for first, second in itertools.pairwise(found):
        if first == second:
            raise InputError(f"data.path '{path}' names {first} twice; name each shard once.")
    return found


def _expand_braces(path: str) -> list[str] | None:
    """What a pattern with braces stands for; None where it has none to expand."""
    if "{" not in path or (not is_remote(path) and os.path.exists(local_path(path))):
        return None
    from braceexpand import UnbalancedBracesError, braceexpand

    # The library makes the whole of it before it gives the first.
    ranges = re.findall(r"\{(\d{1,18})\.\.(\d{1,18})\}", path)
    if math.prod(abs(int(b) - int(a)) + 1 for a, b in ranges) > _MAX_EXPANDED:
        raise InputError(
            f"data.path '{path}' expands to more than {_MAX_EXPANDED} names; check the pattern."
        )
    try:
        pieces = list(itertools.islice(braceexpand(path, escape=False), _MAX_EXPANDED + 1))
    except UnbalancedBracesError:
        raise InputError(
            f"data.path '{path}' has a brace without its partner; write a pattern such as "
            "shard-{000000..000099}.tar."
        ) from None
    if len(pieces) > _MAX_EXPANDED:
        raise InputError(
            f"data.path '{path}' expands to more than {_MAX_EXPANDED} names; check the pattern."
        )
    return None if pieces == [path] else pieces


def _check_all_there(path: str, pieces: Iterable[str]) -> None:
    """Remote files are asked for when they are opened, these here: all at once, named by one."""
    plain = [piece for piece in pieces if _is_plain_tar(piece) and not is_remote(piece)]
    missing = [piece for piece in plain if not os.path.isfile(local_path(piece))]
    if missing:
        raise InputError(
            f"data.path '{path}' expands to {len(plain)} files of which {len(missing)} "
            f"{'does' if len(missing) == 1 else 'do'} not exist, the first is '{missing[0]}'; "
            "restore it or mend the pattern."
        )


def _is_plain_tar(piece: str) -> bool:
    if is_remote(piece):
        return _url_path(piece).endswith(".tar") and not _has_remote_magic(piece)
    return piece.endswith(".tar") and not glob.has_magic(piece) and not os.path.isdir(piece)


def _find_piece(piece: str, where: str) -> list[str]:
    find: Callable[[str, str], list[str]] = _find_remote if is_remote(piece) else _find_local
    return find(piece, where)


def _find_local(piece: str, where: str) -> list[str]:
    path = local_path(piece)
    if os.path.isdir(path):
        try:
            names = os.listdir(path)
        except OSError as error:
            raise InputError(
                f"{where} is a folder that cannot be listed ({error.strerror}); check its rights."
            ) from None
        found = [name for name in names if _is_shard_name(name)]
        if not found:
            raise InputError(
                f"{where} is a folder without a .tar file; point it at the folder of shards."
            )
        return [os.path.join(path, name) for name in found]
    if os.path.isfile(path):
        if not path.endswith(".tar"):
            raise InputError(
                f"{where} is a file that does not end in .tar; shards are plain .tar files."
            )
        return [path]
    if glob.has_magic(path):
        matches = glob.glob(path, recursive=True)
        found = [match for match in matches if match.endswith(".tar") and os.path.isfile(match)]
        if not found:
            raise InputError(f"{where} matches no .tar file; check the pattern.")
        return found
    raise InputError(f"{where} does not exist; set it to {_KINDS}.")


def _find_remote(piece: str, where: str) -> list[str]:
    if _is_plain_tar(piece):
        return [piece]
    store, path = remote.filesystem(piece)
    store.invalidate_cache()  # a listing kept from an earlier call may be out of date
    if _has_remote_magic(piece):
        names = remote.call(piece, "listed", lambda: store.glob(path))
        found = [name for name in names if _is_shard_name(name.rpartition("/")[2])]
        if not found:
            raise InputError(f"{where} matches no .tar file; check the pattern.")
        return [store.unstrip_protocol(name) for name in found]
    entries = remote.call(piece, "listed", lambda: store.ls(path, detail=True))
    found = [entry["name"] for entry in entries if _is_shard_of(path, entry)]
    if not found:
        raise InputError(
            f"{where} lists no .tar file; point it at the folder of shards or, where the server "
            "gives no listing, name them by a pattern such as shard-{000000..000099}.tar."
        )
    return [store.unstrip_protocol(name) for name in found]


def _is_shard_of(folder: str, entry: dict) -> bool:
    """Web pages also link to what lies elsewhere."""
    parent, _, name = entry["name"].rpartition("/")
    return (
        entry["type"] != "directory"
        and _is_shard_name(name)
        and parent.strip("/") == folder.strip("/")
    )


def _is_shard_name(name: str) -> bool:
    """A hidden file is somebody's unfinished or foreign one."""
    return name.endswith(".tar") and not name.startswith(".")


def _url_path(url: str) -> str:
    """The URL's path; a query (a signature, a version) belongs to no file name."""
    return urlsplit(url).path if url.startswith(("http://", "https://")) else url


def _has_remote_magic(url: str) -> bool:
    if url.startswith(("http://", "https://")):
        # "?" begins a query there, and "[" an address before the path.
        return any(character in _url_path(url) for character in "*[")
    return glob.has_magic(url.split("://", 1)[1])
