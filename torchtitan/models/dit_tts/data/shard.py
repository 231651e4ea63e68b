"""The samples of one shard, a tar: read in one pass, grouped by key, each member looked at once.

Whatever cannot be used becomes a `Problem` and the rest is kept, so that one corrupt sample costs one
sample. Sentences have no path: an index is the same wherever its tar lies.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from torchtitan.models.dit_tts.bounded import npy_header, parse_json
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.members import (
    HASHES_KEY,
    LABELS,
    METADATA_SUFFIX,
    label_of,
    metadata_hash,
    text_of,
    weight_of,
)
from torchtitan.models.dit_tts.data.storage import ShardFile
from torchtitan.models.dit_tts.data.tar_reader import Member, walk_members
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote

_MAX_NPY_HEADER_BYTES = 4096
_MAX_JSON_BYTES = 16 << 20
_MAX_ARRAY_BYTES = 256 << 20
_ITEM_BYTES = {"<f2": 2, "<f4": 4}
# Bit patterns with all exponent bits set are infinities and NaNs.
_EXPONENTS = {2: 0x7C00, 4: 0x7F800000}
# What every numpy writes; anything else goes through numpy's own parser, which is slow.
_PLAIN_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00[\x00-\xff]{2}\{'descr': '(<f[24])', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), ([1-9]\d{0,8})\), \} *\n"
)


class Problem(NamedTuple):
    """A fault of a tar or of a sample.

    Attributes:
        kind: "shard" (the file itself), or of a sample "incomplete", "not_finite", "changed" (not what
            its writer noted), "unreadable" (the disk) or "unusable".
        key: the sample's, "" where none can be named.
    """

    kind: str
    key: str
    sentence: str


class StoredArray(NamedTuple):
    offset: int
    rows: int
    width: int
    item_bytes: int
    hash: int


class StoredMetadata(NamedTuple):
    offset: int
    size: int
    hash: int
    text: str
    verbatim: str
    weight: float
    labels: dict[str, str | None]
    written_hashes: dict[str, Any]


class StoredSample(NamedTuple):
    key: str
    arrays: dict[str, StoredArray]
    metadata: StoredMetadata


@dataclass
class ShardContents:
    """All that one pass over a shard finds."""

    channels: int = 0
    samples: list[StoredSample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    characters: str = ""
    verbatim_characters: str = ""


class InvalidSample(Exception):
    """A member with a value that breaks a rule, and its kind of `Problem`. No text names the tar."""

    def __init__(self, value: str, rule: str, kind: str = "unusable"):
        super().__init__(f"{value}; {rule}")
        self.kind = kind


def read_shard(source: ShardFile) -> ShardContents:
    """Read a shard from start to end."""
    contents = ShardContents()
    groups: dict[str, dict[str, Any]] = {}
    broken: set[str] = set()

    def report(sentence: str) -> None:
        contents.problems.append(Problem("shard", "", sentence))

    for key, suffix, read in _members(source, report):
        found = groups.setdefault(key, {})
        try:
            if suffix in found:
                raise InvalidSample(
                    f"sample '{key}' has the member .{suffix} twice",
                    "keys must be unique within a shard",
                )
            found[suffix] = None
            found[suffix] = read()
        except InvalidSample as invalid:
            contents.problems.append(Problem(invalid.kind, key, str(invalid)))
            broken.add(key)
    characters: set[str] = set()
    verbatim_characters: set[str] = set()
    for key, found in groups.items():
        if key in broken:
            continue
        try:
            sample = _complete(key, found, contents.channels)
        except InvalidSample as invalid:
            contents.problems.append(Problem(invalid.kind, key, str(invalid)))
            continue
        contents.channels = sample.arrays["latents"].width
        contents.samples.append(sample)
        characters.update(sample.metadata.text)
        verbatim_characters.update(sample.metadata.verbatim)
    contents.characters = "".join(sorted(characters))
    contents.verbatim_characters = "".join(sorted(verbatim_characters))
    if not contents.samples and not contents.problems:
        needed = ", ".join(f"KEY.{suffix}" for suffix in members.suffixes())
        report(f"none of its members belongs to a sample; each sample needs {needed}")
    return contents


_Member = tuple[str, str, Callable[[], StoredArray | StoredMetadata]]
"""A sample's key, a member's suffix, and what reads it or raises InvalidSample"""


def _members(source: ShardFile, report: Callable[[str], None]) -> Iterator[_Member]:
    suffixes = members.suffixes()
    for member in walk_members(source, report):
        folder, slash, basename = member.name.rpartition("/")
        stem, _, suffix = basename.partition(".")
        suffix = suffix.lower()
        if suffix in suffixes and stem:
            # "tar -cf x.tar ." prefixes names with "./"; that is not part of a sample's name.
            key = (folder + slash + stem).removeprefix("./")
            read = _read_metadata if suffix == METADATA_SUFFIX else _read_array
            yield key, suffix, partial(read, source, member)


def _complete(key: str, found: dict[str, Any], channels: int) -> StoredSample:
    """The sample of some members, which must all be there and fit each other and, unless it is 0,
    `channels`."""
    if not members.is_key(key):
        raise InvalidSample(f"key {key!r} cannot name a sample", members.KEY_RULE)
    missing = [f".{suffix}" for suffix in members.suffixes() if suffix not in found]
    if missing:
        raise InvalidSample(
            f"sample '{key}' is incomplete, it lacks {', '.join(missing)}",
            "complete or remove it",
            "incomplete",
        )
    arrays = {array.name: found[array.suffix] for array in members.ARRAYS}
    metadata: StoredMetadata = found[METADATA_SUFFIX]
    frames = arrays["latents"].rows
    if frames == 0:
        raise InvalidSample(f"sample '{key}' has no latent frame", "leave empty utterances out")
    for member in members.ARRAYS:
        array = arrays[member.name]
        where = f"the .{member.suffix} of sample '{key}'"
        width = member.width or channels or arrays["latents"].width
        if array.width != width:
            raise InvalidSample(
                f"{where} is {array.width} wide, but {width} is needed",
                "all samples of a dataset must have the same width",
            )
        if member.length == "frames" and array.rows != frames:
            rows = f"{array.rows} rows for {frames} latent frames"
            raise InvalidSample(f"{where} has {rows}", "write it again")
        written = metadata.written_hashes.get(member.suffix)
        if written is not None and written != f"{array.hash:016x}":
            raise InvalidSample(
                f"{where} is not as it was written (its {HASHES_KEY} in the JSON is {written}, "
                f"found {array.hash:016x}), so it is corrupt",
                "copy or write the tar again",
                "changed",
            )
    return StoredSample(key, arrays, metadata)


def _read_array(source: ShardFile, member: Member) -> StoredArray:
    where = f"member '{member.name}'"
    _refuse_link(member)
    # The header is judged before the rest is read: other files end in .npy, too, and may be huge.
    descr, shape, data_start = _npy_header(_read(source, member, _MAX_NPY_HEADER_BYTES), where)
    item_bytes = _ITEM_BYTES[descr]
    expected = data_start + shape[0] * shape[1] * item_bytes
    if member.size != expected or expected > _MAX_ARRAY_BYTES:
        raise InvalidSample(
            f"{where} has {member.size} bytes, but its npy header (shape {shape}) needs "
            f"{expected}, and at most {_MAX_ARRAY_BYTES} are read",
            "write it again",
        )
    data = _read(source, member, member.size)
    values = memoryview(data)[data_start:]
    return _checked_array(values, member.offset + data_start, shape, item_bytes, where)


def _checked_array(
    values: memoryview, offset: int, shape: tuple[int, int], item_bytes: int, where: str
) -> StoredArray:
    bits: np.ndarray = np.frombuffer(values, np.uint16 if item_bytes == 2 else np.uint32)
    exponent = bits.dtype.type(_EXPONENTS[item_bytes])
    if ((bits & exponent) == exponent).any():
        raise InvalidSample(
            f"{where} has values that are NaN or infinite",
            "encode the utterance again or leave it out",
            "not_finite",
        )
    return StoredArray(offset, *shape, item_bytes, xxhash.xxh3_64_intdigest(values))


def _refuse_link(member: Member) -> None:
    if member.is_link:
        raise InvalidSample(
            f"member '{member.name}' is a link, which cannot be read by offset",
            "write the tar again with --dereference --hard-dereference",
        )


def _npy_header(head: bytes, where: str) -> tuple[str, tuple[int, int], int]:
    """(dtype, shape, where the data begin) of an npy file that begins with `head`."""
    plain = _PLAIN_NPY_HEADER.match(head)
    if plain and plain.end() == 10 + int.from_bytes(head[8:10], "little"):
        return plain[1].decode(), (int(plain[2]), int(plain[3])), plain.end()
    try:
        shape, is_fortran, dtype, start = npy_header(head)
    except ValueError as error:
        raise InvalidSample(f"{where} is {error}", "write it with numpy.save") from None
    if dtype.str not in _ITEM_BYTES:
        raise InvalidSample(
            f"{where} has dtype {dtype.str!r}",
            "only little-endian float16 and float32 are read (pickled objects never are), so convert "
            "it with astype(numpy.float16)",
        )
    is_shape = len(shape) == 2 and 0 <= shape[0] < 2**31 and 0 < shape[1] < 2**31
    if not is_shape or is_fortran:
        raise InvalidSample(
            f"{where} has shape {str(shape)[:60]}, fortran_order {is_fortran}",
            "it must be (rows, width) in C order, so write it again through numpy.ascontiguousarray",
        )
    return dtype.str, (shape[0], shape[1]), start


def _read(source: ShardFile, member: Member, size: int) -> bytes:
    """The first bytes of a member. What the disk cannot read is one member's problem; a server that
    cannot be reached is an error."""
    try:
        return source.pread(min(size, member.size), member.offset)
    except InputError as error:
        if is_remote(source.path):
            raise
        what, _, rule = str(error).partition("; ")
        where = f"member '{member.name}' cannot be read"
        raise InvalidSample(f"{where}: {what}", rule, "unreadable") from error


def _read_metadata(source: ShardFile, member: Member) -> StoredMetadata:
    where = f"member '{member.name}'"
    _refuse_link(member)
    if member.size > _MAX_JSON_BYTES:
        raise InvalidSample(
            f"{where} has {member.size} bytes", f"at most {_MAX_JSON_BYTES} are read"
        )
    return _checked_metadata(_read(source, member, member.size), member.offset, where)


def _checked_metadata(data: bytes, offset: int, where: str) -> StoredMetadata:
    try:
        metadata = parse_json(str(data, "utf-8"))
        text, verbatim = metadata["text"], text_of(metadata, True)
        for each in (text, verbatim):
            each.encode("utf-8")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidSample(
            f'{where} is not a UTF-8 JSON object with a "text" string',
            "every sample needs its text",
        ) from None
    hashes = metadata.get(HASHES_KEY)
    if not isinstance(hashes, dict):
        hashes = {}
    written = hashes.get(METADATA_SUFFIX)
    if written is not None and written != metadata_hash(metadata):
        raise InvalidSample(
            f"{where} is not as it was written, so it is corrupt",
            f'copy or write the tar again, or take its key "{HASHES_KEY}" out if it was changed on purpose',
            "changed",
        )
    labels = {name: label_of(metadata, name) for name in LABELS}
    data_hash = xxhash.xxh3_64_intdigest(data)
    weight = weight_of(metadata)
    return StoredMetadata(offset, len(data), data_hash, text, verbatim, weight, labels, hashes)
