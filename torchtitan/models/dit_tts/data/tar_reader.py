"""Walk the members of a tar strictly: corruption is an error, never a short list.

Python's `tarfile` takes a header that fails its checksum for the end of the archive and stops silently, so one
flipped bit can lose all of a shard behind it. Here a walk reports it and continues at the next valid header; the
end-of-archive marker (two zero blocks) must be there, and only zeros may follow it. Reads what `tarfile` reads:
ustar, GNU and PAX archives, and old headers without a magic.
"""

import io
import tarfile
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

from torchtitan.models.dit_tts.data.storage import ShardFile

_BLOCK_BYTES = tarfile.BLOCKSIZE
# Of an extended header; `tarfile` reads all of it at once.
_MAX_RECORD_BYTES = 1 << 20
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_GNU_CONTINUED = b"M"
# In every header since ustar; a search for the next header needs it.
_MAGIC, _MAGIC_OFFSET = b"ustar", 257
_SEARCH_BYTES = 1 << 20  # a multiple of a block
_ENCODING, _ERRORS = "utf-8", "backslashreplace"  # of names
_AGAIN = "copy or write it again"


class Member(NamedTuple):
    """One regular file in a tar, or a link (which has no data): its name, with bytes that are not utf-8 escaped, and where
    its data lie, in bytes from the start of the tar."""

    name: str
    offset: int
    size: int
    is_link: bool


class _CorruptTar(Exception):
    """What is wrong with the archive, and from where to look for a valid header; None: nowhere."""

    def __init__(self, sentence: str, search_from: int | None = None):
        super().__init__(sentence)
        self.search_from = search_from


def walk_members(source: ShardFile, on_problem: Callable[[str], None]) -> Iterator[Member]:
    """Yield the regular files and links of a tar, in order. `on_problem` gets each problem in a sentence without the
    tar's name."""
    position: int | None = 0
    while position is not None:
        try:
            yield from _walk_from(source, position)
            return
        except _CorruptTar as problem:
            on_problem(str(problem))
            position = _next_header(source, problem.search_from)


def _walk_from(source: ShardFile, position: int) -> Iterator[Member]:
    """Members from the header at `position` on; _CorruptTar at the first problem."""
    file = _Reader(source)
    file.seek(position)
    tar = tarfile.TarFile(fileobj=file, tarinfo=_StrictHeader, encoding=_ENCODING, errors=_ERRORS)
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # or it would hold all headers
        if tar.offset > source.size:
            raise _CorruptTar(
                f"member '{member.name}' should end before byte {tar.offset} but the tar has "
                f"{source.size} bytes, so it is truncated; {_AGAIN}"
            )
        if member.issparse() or member.type == _GNU_CONTINUED:
            raise _CorruptTar(
                f"member '{member.name}' is sparse or split over volumes; write the tar again without "
                "--sparse and --multi-volume",
                tar.offset,
            )
        is_link = member.islnk() or member.issym()
        if is_link or member.isreg():
            yield Member(member.name, member.offset_data, member.size, is_link)


class _Reader(io.RawIOBase):
    """A tar as a file object; `tarfile` reads headers from it, never data."""

    def __init__(self, source: ShardFile):
        self.source = source
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        data = self.source.pread(size, self._position)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position


class _StrictHeader(tarfile.TarInfo):
    """A header that raises where `tarfile` would take it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or header.type in _EXTENDED and header.size > _MAX_RECORD_BYTES:
            raise tarfile.HeaderError(f"a size of {header.size} bytes")
        return header

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        file = tar.fileobj
        assert isinstance(file, _Reader)
        position = file.tell()
        try:
            return super().fromtarfile(tar)
        # tarfile raises its own errors, and Python's at numbers and nesting that no tar has.
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            block = file.source.pread(_BLOCK_BYTES, position)
            if len(block) < _BLOCK_BYTES:
                raise _CorruptTar(
                    f"the tar ends without an end-of-archive marker, so it is truncated; {_AGAIN}"
                ) from None
            if not any(block):
                _check_end(file.source, position)
                raise  # tarfile's own sign of the end
            what = "not a plain tar" if position == 0 else "the tar is corrupt"
            raise _CorruptTar(
                f"{what} (header at byte {position}: {error}); {_AGAIN} uncompressed",
                position + _BLOCK_BYTES,
            ) from None


def _check_end(source: ShardFile, position: int) -> None:
    """Two zero blocks end a tar; what follows may only be zeros (padding of the last record)."""
    if source.size - position < 2 * _BLOCK_BYTES:
        raise _CorruptTar(f"only part of the end-of-archive marker is there; {_AGAIN}")
    while chunk := source.pread(_SEARCH_BYTES, position):
        if chunk.count(0) != len(chunk):
            raise _CorruptTar(
                f"data follow a zero block at byte {position} or later; the tar is corrupt or several were "
                f"joined by cat, so {_AGAIN} as one",
                position,
            )
        position += len(chunk)


def _next_header(source: ShardFile, position: int | None) -> int | None:
    """The first block at or after `position` (a multiple of 512) that is a valid header."""
    while position is not None and (chunk := source.pread(_SEARCH_BYTES, position)):
        for start in range(0, len(chunk), _BLOCK_BYTES):
            if chunk.startswith(_MAGIC, start + _MAGIC_OFFSET):
                try:
                    header = chunk[start : start + _BLOCK_BYTES]
                    _StrictHeader.frombuf(header, _ENCODING, _ERRORS)
                    return position + start
                except (tarfile.TarError, ValueError, OverflowError):
                    pass
        position += len(chunk)
    return None
