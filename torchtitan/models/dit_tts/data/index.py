"""The index of one tar: where every triplet's arrays lie, made once, kept beside the tar.

Parsing tar headers, npy headers and JSON is what makes reading a tar slow; the index
does it once and leaves offsets. It is stored as ``<tar>.idx``, or in
``$XDG_CACHE_HOME/titan-tts/index`` where the tar's folder cannot be written, records
the tar's size and modification time, and is made again when these differ or the file
cannot be read. Processes that start together may each make it: all write the same
bytes under a temporary name and rename, so no lock is needed.

The flipped bits that the index finds are those in headers and JSON; the latents
themselves are not summed.
"""

import ast
import hashlib
import json
import os
import re
import struct
import zlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..errors import InputError
from .shard_writer import LATENTS_SUFFIX, METADATA_SUFFIX, REFERENCE_SUFFIX, atomic_file
from .tar_members import Member, shown, walk_members

INDEX_VERSION = 1
_MAGIC = b"TTSINDEX"
# magic, version, channels, samples, bytes of all keys, tar size, tar mtime_ns, CRC32 of the columns
_HEADER = struct.Struct("<8sIIQQQqI4x")

# One row a sample. Offsets are of array data (behind the npy header), in bytes from the
# start of the tar; item bytes are 2 for float16 and 4 for float32; key_end is where the
# sample's key ends in the joined utf-8 of all keys.
COLUMNS: dict[str, np.dtype] = {
    "latents_offset": np.dtype("<i8"),
    "reference_offset": np.dtype("<i8"),
    "metadata_offset": np.dtype("<i8"),
    "key_end": np.dtype("<i8"),
    "frames": np.dtype("<i4"),
    "reference_frames": np.dtype("<i4"),
    "metadata_bytes": np.dtype("<i4"),
    "text_bytes": np.dtype("<i4"),
    "latents_item_bytes": np.dtype("<u1"),
    "reference_item_bytes": np.dtype("<u1"),
}

_SUFFIXES = {
    LATENTS_SUFFIX.encode(): LATENTS_SUFFIX,
    REFERENCE_SUFFIX.encode(): REFERENCE_SUFFIX,
    METADATA_SUFFIX.encode(): METADATA_SUFFIX,
}
_ITEM_BYTES = {"<f2": 2, "<f4": 4}
# What every numpy writes; anything else goes through the slow literal parser.
_PLAIN_NPY_HEADER = re.compile(
    rb"\{'descr': '(<f[24])', 'fortran_order': False, 'shape': \((\d+), (\d+)\), \} *\n"
)


@dataclass(frozen=True)
class ShardIndex:
    """Columns over the complete triplets of one tar, in order of first appearance.

    Attributes:
        channels: width C of every array in the tar.
        tar_bytes, tar_mtime_ns: size and modification time of the tar it was made from.
        columns: name -> array of one row a sample, as in ``COLUMNS``.
        keys: utf-8 of all keys, joined.
    """

    channels: int
    tar_bytes: int
    tar_mtime_ns: int
    columns: dict[str, np.ndarray] = field(repr=False)
    keys: bytes = field(repr=False)

    def __len__(self) -> int:
        return len(self.columns["frames"])

    def key(self, row: int) -> str:
        ends = self.columns["key_end"]
        return self.keys[int(ends[row - 1]) if row else 0 : int(ends[row])].decode("utf-8")

    @cached_property
    def payload(self) -> bytes:
        """Everything that the tar's bytes determine, in a fixed order."""
        return b"".join([*(self.columns[name].tobytes() for name in COLUMNS), self.keys])

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over contents and size; the same wherever and whenever the tar was copied."""
        return hashlib.sha256(
            struct.pack("<QQ", self.tar_bytes, self.channels) + self.payload
        ).digest()


def load_index(tar_path: str) -> ShardIndex:
    """The index of ``tar_path``: from its sidecar if that is fresh, else made and stored.

    Raises:
        InputError: the tar cannot be read, is damaged, or holds no usable triplets.
    """
    try:
        stat = os.stat(tar_path)
    except OSError as error:
        raise _cannot_open(tar_path, error) from None
    places = [tar_path + ".idx", _cache_path(tar_path)]
    for place in places:
        index = _read_sidecar(place, stat.st_size, stat.st_mtime_ns)
        if index is not None:
            return index
    index = build_index(tar_path)
    for place in places:
        try:
            _write_sidecar(place, index)
            break
        except OSError:
            continue  # nowhere to keep it is no failure: it is made again at the next start
    return index


def build_index(tar_path: str) -> ShardIndex:
    """Parse the whole tar once."""
    try:
        descriptor = os.open(tar_path, os.O_RDONLY)
    except OSError as error:
        raise _cannot_open(tar_path, error) from None
    try:
        stat = os.fstat(descriptor)
        samples = _collect_members(descriptor, tar_path)
        rows, keys, channels = [], [], 0
        key_end = 0
        for key, members in samples.items():
            latents = _npy_location(descriptor, tar_path, members[LATENTS_SUFFIX])
            reference = _npy_location(descriptor, tar_path, members[REFERENCE_SUFFIX])
            text_bytes = _text_bytes(descriptor, tar_path, key, members[METADATA_SUFFIX])
            channels = channels or latents[2]
            if latents[1] == 0:
                raise InputError(
                    f"{tar_path}: sample '{key}' has no latent frame; leave empty utterances out."
                )
            if {latents[2], reference[2]} != {channels}:
                raise InputError(
                    f"{tar_path}: the arrays of sample '{key}' are {latents[2]} and {reference[2]} "
                    f"wide where the tar's first is {channels}; all arrays of a dataset must have "
                    "the same width."
                )
            key_utf8 = key.encode("utf-8")
            key_end += len(key_utf8)
            keys.append(key_utf8)
            metadata = members[METADATA_SUFFIX]
            rows.append(
                (latents[0], reference[0], metadata.offset, key_end, latents[1], reference[1],
                 metadata.size, text_bytes, latents[3], reference[3])
            )  # fmt: skip
        after = os.stat(tar_path)
        if (after.st_size, after.st_mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            raise InputError(
                f"{tar_path}: changed while it was being indexed; start again when it is complete."
            )
    finally:
        os.close(descriptor)
    columns = {
        name: np.array(column, dtype=dtype)
        for (name, dtype), column in zip(COLUMNS.items(), zip(*rows, strict=True), strict=True)
    }
    return ShardIndex(channels, stat.st_size, stat.st_mtime_ns, columns, b"".join(keys))


def _cannot_open(tar_path: str, error: OSError) -> InputError:
    return InputError(
        f"{tar_path}: cannot be opened ({error.strerror}); check the path and its rights."
    )


def _collect_members(descriptor: int, tar_path: str) -> dict[str, dict[str, Member]]:
    """Group members by key as webdataset does; every group must be a whole triplet."""
    samples: dict[str, dict[str, Member]] = {}
    for member in walk_members(descriptor, tar_path):
        folder, slash, basename = member.name.rpartition(b"/")
        stem, _, suffix = basename.partition(b".")
        kind = _SUFFIXES.get(suffix.lower())
        if kind is None or not stem:
            continue
        if member.is_link:
            raise InputError(
                f"{tar_path}: member '{shown(member.name)}' is a link, which cannot be read by "
                "offset; write the tar again with --dereference --hard-dereference."
            )
        # "tar -cf x.tar ." prefixes names with "./"; that is not part of a sample's name.
        key = shown((folder + slash + stem).removeprefix(b"./"))
        members = samples.setdefault(key, {})
        if kind in members:
            raise InputError(
                f"{tar_path}: sample '{key}' has the member .{kind} twice; keys must be unique "
                "within a tar."
            )
        members[kind] = member
    incomplete = [key for key, members in samples.items() if len(members) < len(_SUFFIXES)]
    if not samples:
        raise InputError(
            f"{tar_path}: none of its members belongs to a sample; each sample needs "
            f"KEY.{LATENTS_SUFFIX}, KEY.{REFERENCE_SUFFIX} and KEY.{METADATA_SUFFIX}."
        )
    if incomplete:
        missing = ", ".join(
            f".{kind}" for kind in _SUFFIXES.values() if kind not in samples[incomplete[0]]
        )
        raise InputError(
            f"{tar_path}: {len(incomplete)} of {len(samples)} samples are incomplete, the first is "
            f"'{incomplete[0]}', which lacks {missing}; complete or remove them."
        )
    return samples


def _npy_location(descriptor: int, tar_path: str, member: Member) -> tuple[int, int, int, int]:
    """(offset of the data in the tar, frames, channels, bytes an item) of one npy member."""
    head = member.head
    where = f"{tar_path}: member '{shown(member.name)}'"
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise InputError(f"{where} is not an npy array; write it with numpy.save.")
    wide = head[6] >= 2  # format 1 has a 16-bit header length, 2 and 3 a 32-bit one
    start = 12 if wide else 10
    header_bytes = int.from_bytes(head[8:start], "little")
    data_start = start + header_bytes
    if data_start > member.size:
        raise InputError(f"{where} has an npy header longer than the member; write it again.")
    if data_start > len(head):
        head = os.pread(descriptor, data_start, member.offset)
    plain = _PLAIN_NPY_HEADER.fullmatch(head, start, data_start)
    if plain:
        descr, shape = plain[1].decode(), (int(plain[2]), int(plain[3]))
    else:
        descr, shape = _parse_npy_header(head[start:data_start], where)
    item_bytes = _ITEM_BYTES[descr]
    expected = data_start + shape[0] * shape[1] * item_bytes
    if member.size != expected:
        raise InputError(
            f"{where} has {member.size} bytes where its npy header (shape {shape}) needs "
            f"{expected}; write it again."
        )
    return member.offset + data_start, shape[0], shape[1], item_bytes


def _parse_npy_header(text: bytes, where: str) -> tuple[str, tuple[int, int]]:
    try:
        header = ast.literal_eval(text.decode("latin-1").strip())
        descr, fortran_order, shape = header["descr"], header["fortran_order"], header["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError):
        raise InputError(
            f"{where} has an npy header that cannot be read; write it again with numpy.save."
        ) from None
    if not isinstance(descr, str) or descr not in _ITEM_BYTES:
        raise InputError(
            f"{where} has dtype {descr!r}; only little-endian float16 and float32 are read "
            "(pickled objects never are), so convert it with astype(numpy.float16)."
        )
    whole = isinstance(shape, tuple) and all(
        isinstance(length, int) and length >= 0 for length in shape
    )
    if not whole or len(shape) != 2 or shape[1] == 0:
        raise InputError(f"{where} has shape {shape}; it must be (frames, channels).")
    if fortran_order:
        raise InputError(
            f"{where} is stored in Fortran order (a transposed array was saved); "
            "write it again through numpy.ascontiguousarray."
        )
    return descr, shape


def _text_bytes(descriptor: int, tar_path: str, key: str, member: Member) -> int:
    data = (
        member.head
        if member.size <= len(member.head)
        else os.pread(descriptor, member.size, member.offset)
    )
    try:
        text = json.loads(data)["text"]
        return len(text.encode("utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{tar_path}: the JSON of sample '{key}' is no utf-8 object with a \"text\" string; "
            "every sample needs its text."
        ) from None


def _cache_path(tar_path: str) -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    real = os.path.realpath(tar_path)
    name = (
        f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:20]}-{os.path.basename(real)[:100]}.idx"
    )
    return os.path.join(base, "titan-tts", "index", name)


def _write_sidecar(path: str, index: ShardIndex) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    payload = index.payload
    header = _HEADER.pack(
        _MAGIC, INDEX_VERSION, index.channels, len(index), len(index.keys),
        index.tar_bytes, index.tar_mtime_ns, zlib.crc32(payload),
    )  # fmt: skip
    with atomic_file(path) as file:
        file.write(header)
        file.write(payload)


def _read_sidecar(path: str, tar_bytes: int, tar_mtime_ns: int) -> ShardIndex | None:
    """The stored index, or None where it is absent, stale, of another version or damaged."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    if len(data) < _HEADER.size:
        return None
    magic, version, channels, samples, keys_bytes, size, mtime_ns, crc = _HEADER.unpack_from(data)
    if (magic, version, size, mtime_ns) != (_MAGIC, INDEX_VERSION, tar_bytes, tar_mtime_ns):
        return None
    row_bytes = sum(dtype.itemsize for dtype in COLUMNS.values())
    if len(data) != _HEADER.size + samples * row_bytes + keys_bytes:
        return None
    if zlib.crc32(memoryview(data)[_HEADER.size :]) != crc:
        return None
    columns, position = {}, _HEADER.size
    for name, dtype in COLUMNS.items():
        columns[name] = np.frombuffer(data, dtype, count=samples, offset=position)
        position += samples * dtype.itemsize
    return ShardIndex(channels, size, mtime_ns, columns, data[position:])
