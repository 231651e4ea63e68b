"""Walk the members of a tar strictly: damage is a problem that is told, never a short list.

Python's ``tarfile`` (and what is built on it) takes a header that fails its
checksum for the end of the archive and stops without a word, so one flipped bit
can lose most of a shard. Here every header is checked, the end-of-archive marker
(two zero blocks) must be there and only zeros may follow it. Reads ustar, GNU and
PAX archives with long names, and old headers without a magic.

A walk that is given ``on_problem`` tells it what is wrong and goes on at the next
sound header, so that the rest of a damaged archive can still be used.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torchtitan.models.dit_tts.data.storage import ShardFile
from torchtitan.models.dit_tts.errors import InputError

BLOCK_BYTES = 512
# Read with each header so that the start of the data needs no second system call.
HEAD_BYTES = 256
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_MAX_NAME_RECORD_BYTES = 1 << 20
_MAX_DIGITS = 20

_REGULAR = b"\0" + b"07"
_LINKS = b"12"
# Devices, folders and volume labels occupy no data blocks whatever their size field says.
_WITHOUT_DATA = b"123456V"
_GNU_LONG_NAME, _GNU_LONG_LINK, _GNU_SPARSE, _GNU_CONTINUED = b"L", b"K", b"S", b"M"
_PAX_LOCAL, _PAX_GLOBAL = b"xX", b"g"
# In every header since ustar; a search for the next header needs it.
_MAGIC, _MAGIC_OFFSET = b"ustar", 257
_SEARCH_BYTES = 1 << 20  # a multiple of a block


class Member(NamedTuple):
    """One regular file in a tar, or a link to one.

    name: path within the tar, bytes. offset: of its data, in bytes from the start of
    the tar. size: bytes of data. head: the first bytes of the data (at most
    ``HEAD_BYTES``). is_link: it names another member and has no data of its own.
    """

    name: bytes
    offset: int
    size: int
    head: bytes
    is_link: bool


class _Damage(Exception):
    """What is wrong with the archive, and from where a sound header may be looked for."""

    def __init__(self, sentence: str, search_from: int | None):
        super().__init__(sentence)
        self.search_from = search_from


def walk_members(
    source: ShardFile, on_problem: Callable[[str], None] | None = None
) -> Iterator[Member]:
    """Yield the regular files and links of a tar, in order.

    Args:
        on_problem: told each problem in a sentence without the tar's name.

    Raises:
        InputError: damaged, truncated, compressed or sparse archive, with its place, where no
            ``on_problem`` is given.
    """
    position: int | None = 0
    while position is not None:
        try:
            yield from _walk_from(source, position)
            return
        except _Damage as damage:
            if on_problem is None:
                raise InputError(f"{source.path}: {damage}") from None
            on_problem(str(damage))
            position = damage.search_from
            if position is not None:
                position = _next_header(source, position)


def _walk_from(source: ShardFile, position: int) -> Iterator[Member]:
    """Members from the header at ``position`` on; _Damage at the first problem."""
    long_name: bytes | None = None
    pax_global: dict[bytes, bytes] = {}
    pax_local: dict[bytes, bytes] = {}
    while True:
        block = source.pread(BLOCK_BYTES + HEAD_BYTES, position)
        header, head = block[:BLOCK_BYTES], block[BLOCK_BYTES:]
        if len(header) < BLOCK_BYTES:
            raise _Damage(
                f"the tar ends at byte {source.size} without an end-of-archive marker, so it is "
                "truncated; copy or write it again.",
                None,
            )
        if header == _ZERO_BLOCK:
            _check_end(source, position)
            return
        _check_header_sum(header, position)
        kind = header[156:157]
        size = _number(header[124:136], position)
        if kind in _PAX_LOCAL or kind == _PAX_GLOBAL or kind in (_GNU_LONG_NAME, _GNU_LONG_LINK):
            data = _record_data(source, position, size)
            if kind == _GNU_LONG_NAME:
                long_name = data.split(b"\0", 1)[0]
            elif kind == _PAX_GLOBAL:
                pax_global.update(_pax_records(data, position))
            elif kind in _PAX_LOCAL:
                pax_local = _pax_records(data, position)
            position += BLOCK_BYTES + _padded(size)
            continue

        pax = {**pax_global, **pax_local} if pax_global else pax_local
        name = pax.get(b"path") or long_name or _header_name(header)
        if b"size" in pax:
            size = _pax_size(pax[b"size"], name, position)
        has_data = kind not in _WITHOUT_DATA
        offset = position + BLOCK_BYTES
        end = offset + (_padded(size) if has_data else 0)
        if kind in (_GNU_SPARSE, _GNU_CONTINUED) or any(
            key.startswith(b"GNU.sparse.") for key in pax
        ):
            raise _Damage(
                f"member '{shown(name)}' is sparse or split over volumes, which cannot be read by "
                "offset; write the tar again without --sparse and --multi-volume.",
                end,
            )
        if end > source.size:
            raise _Damage(
                f"the data of member '{shown(name)}' should end at byte {end} but the tar has "
                f"{source.size} bytes, so it is truncated; copy or write it again.",
                None,
            )
        # A folder in an archive older than ustar is a regular member whose name ends in a slash.
        if kind in _LINKS or (kind in _REGULAR and not name.endswith(b"/")):
            yield Member(name, offset, size if has_data else 0, head[:size], kind in _LINKS)
        position = end
        long_name, pax_local = None, {}


def _next_header(source: ShardFile, position: int) -> int | None:
    """The first block at or after ``position`` (a multiple of 512) that is a sound header."""
    while block := source.pread(_SEARCH_BYTES, position):
        found = block.find(_MAGIC)
        while found >= 0:
            start = found - _MAGIC_OFFSET
            if start >= 0 and start % BLOCK_BYTES == 0:
                header = block[start : start + BLOCK_BYTES]
                if len(header) == BLOCK_BYTES and _sums_agree(header):
                    return position + start
            found = block.find(_MAGIC, found + 1)
        position += len(block)
    return None


def shown(name: bytes) -> str:
    """A member's name as text, for keys and messages; bytes that are not utf-8 are escaped."""
    return name.decode("utf-8", "backslashreplace")


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _check_header_sum(header: bytes, position: int) -> None:
    if _sums_agree(header):
        return
    if position == 0:
        raise _Damage(
            "not a plain tar (its first header fails its checksum); shards must be uncompressed "
            "ustar, GNU or PAX tars, so write it again if it is damaged.",
            BLOCK_BYTES,
        )
    raise _Damage(
        f"the header at byte {position} fails its checksum, so the tar is damaged; copy or write "
        "it again.",
        position + BLOCK_BYTES,
    )


def _sums_agree(header: bytes) -> bool:
    """The sum of the header's bytes, its own field counted as eight spaces, is the stored one."""
    field = header[148:156]
    try:
        stored = int(field.split(b"\0", 1)[0].strip() or b"-1", 8)
    except ValueError:
        return False
    unsigned = sum(header) - sum(field) + 8 * 32
    if stored == unsigned:
        return True
    # Some old writers summed signed bytes.
    signed = unsigned - 256 * (
        sum(byte > 127 for byte in header) - sum(byte > 127 for byte in field)
    )
    return stored == signed


def _number(field: bytes, position: int) -> int:
    """A size field: octal digits, or base 256 when its first bit is set (GNU, above 8 GiB)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise _Damage(
            f"the header at byte {position} has the size field {field!r}, which is no octal or "
            "base-256 number; write the tar again.",
            position + BLOCK_BYTES,
        )
    return int(digits or b"0", 8)


def _header_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    # GNU's own magic ("ustar  ") uses the prefix field for other things.
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        if prefix:
            return prefix + b"/" + name
    return name


def _record_data(source: ShardFile, position: int, size: int) -> bytes:
    data = b""
    if size <= _MAX_NAME_RECORD_BYTES:
        data = source.pread(size, position + BLOCK_BYTES)
    if len(data) < size:
        raise _Damage(
            f"the extended header at byte {position} claims {size} bytes that are not there (at "
            f"most {_MAX_NAME_RECORD_BYTES} are allowed); copy or write the tar again.",
            position + BLOCK_BYTES,
        )
    return data


def _pax_records(data: bytes, position: int) -> dict[bytes, bytes]:
    """Records "LENGTH KEY=VALUE\\n", LENGTH counting the whole record in bytes."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start] != 0:
        space = data.find(b" ", start, start + 21)
        digits = data[start:space] if space > 0 else b""
        stop = start + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : max(stop - 1, 0)].partition(b"=")
        if not equals or stop > len(data) or data[stop - 1 : stop] != b"\n":
            raise _Damage(
                f"the PAX header at byte {position} is malformed, so the tar is damaged; copy or "
                "write it again.",
                position + BLOCK_BYTES,
            )
        records[key] = value
        start = stop
    return records


def _pax_size(value: bytes, name: bytes, position: int) -> int:
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        raise _Damage(
            f"the PAX size of member '{shown(name)}' is {value[:40]!r}, not a decimal number of at "
            f"most {_MAX_DIGITS} digits; write the tar again.",
            position + BLOCK_BYTES,
        )
    return int(value)


def _check_end(source: ShardFile, position: int) -> None:
    """Two zero blocks end a tar; what follows may only be zeros (padding of the last record)."""
    if len(source.pread(2 * BLOCK_BYTES, position)) < 2 * BLOCK_BYTES:
        raise _Damage(
            f"only part of the end-of-archive marker is there (from byte {position}), so the tar "
            "is truncated; copy or write it again.",
            None,
        )
    while chunk := source.pread(_SEARCH_BYTES, position):
        if chunk.count(0) != len(chunk):
            raise _Damage(
                f"data follow a zero block at byte {position} or later; the tar is damaged or "
                "several tars were joined by cat, so write it again as one archive.",
                position,
            )
        position += len(chunk)
