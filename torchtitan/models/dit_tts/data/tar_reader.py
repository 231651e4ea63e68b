"""Walk the members of a tar strictly: corruption is an error, never a short list.

Python's `tarfile` takes a header that fails its checksum for the end of the archive and stops silently, so one
flipped bit can lose all of a shard behind it. Here a walk reports it; the end-of-archive marker (two zero blocks) must
be there, and only zeros may follow it. Reads what `tarfile` reads: ustar, GNU and PAX archives, and old headers.
"""

import io
import tarfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torchtitan.models.dit_tts.data.storage import ShardFile

_BLOCK_BYTES = tarfile.BLOCKSIZE
_MAX_HEADER_BYTES = 1 << 20  # of an extended one, which `tarfile` reads at once
_GNU_CONTINUED = b"M"
_CHUNK_BYTES = 1 << 20
_AGAIN = "copy or write it again"


class Member(NamedTuple):
    """One regular file in a tar, or a link (which has no data): its name, with bytes that are not utf-8 escaped, and where
    its data lie, in bytes from the start of the tar."""

    name: str
    offset: int
    size: int
    is_link: bool


def walk_members(source: ShardFile, on_problem: Callable[[str], None]) -> Iterator[Member]:
    """Yield the regular files and links of a tar, in order. `on_problem` gets what ends the walk before the end of a
    complete tar, in a sentence without its name."""
    start = 0
    try:
        headers = _Headers(source)
        tar = tarfile.TarFile(fileobj=headers, encoding="utf-8", errors="backslashreplace")
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # or it would hold all headers
            if member.size < 0:
                raise tarfile.ReadError(f"a size of {member.size} bytes")
            if tar.offset > source.size:
                on_problem(
                    f"member '{member.name}' should end before byte {tar.offset} but the tar has "
                    f"{source.size} bytes, so it is truncated; {_AGAIN}"
                )
                return
            if member.issparse() or member.type == _GNU_CONTINUED:
                on_problem(
                    f"member '{member.name}' is sparse or split over volumes; write the tar again without "
                    "--sparse and --multi-volume"
                )
                return
            is_link = member.islnk() or member.issym()
            if is_link or member.isreg():
                yield Member(member.name, member.offset_data, member.size, is_link)
            start = tar.offset
        problem = _end_problem(source, start)
    # tarfile raises its own errors, and Python's at numbers and nesting that no tar has.
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        what = "the tar is corrupt" if start else "not a plain tar"
        problem = f"{what} (header at byte {start}: {error})"
    if problem:
        on_problem(f"{problem}; {_AGAIN} uncompressed")


def _end_problem(source: ShardFile, position: int) -> str:
    """Says what is wrong where `tarfile` stopped; empty if there are two zero blocks, followed by zeros only."""
    block = source.pread(_BLOCK_BYTES, position)
    if len(block) < _BLOCK_BYTES:
        return "the tar ends without an end-of-archive marker, so it is truncated"
    if any(block):
        return f"the tar is corrupt (header at byte {position}: bad checksum)"
    if source.size - position < 2 * _BLOCK_BYTES:
        return "only part of the end-of-archive marker is there"
    while chunk := source.pread(_CHUNK_BYTES, position):
        if chunk.count(0) != len(chunk):
            return f"data follow a zero block at byte {position} or later; the tar is corrupt or several were joined by cat"
        position += len(chunk)
    return ""


class _Headers(io.RawIOBase):
    """A tar as a file object, of which `tarfile` reads headers, never data."""

    def __init__(self, source: ShardFile):
        self.source = source
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self.source.pread(size, self._position)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position
