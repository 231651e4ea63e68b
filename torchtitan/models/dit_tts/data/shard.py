"""The samples of one shard, a tar: read in one pass, grouped by key, each member looked at once.

Whatever cannot be used becomes a `Problem` and the rest is kept, so that one corrupt sample costs one
sample. Sentences have no path: an index is the same wherever its tar lies.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from torchtitan.models.dit_tts.bounded import npy_header, parse_json
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.members import HASHES_KEY, LABELS, METADATA_SUFFIX
from torchtitan.models.dit_tts.data.storage import ShardFile
from torchtitan.models.dit_tts.data.tar_reader import Member, walk_members
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote

_MAX_NPY_HEADER_BYTES = 4096
_MAX_JSON_BYTES = 16 << 20
_MAX_ARRAY_BYTES = 256 << 20
# Dtypes that are read, and their exponent bits: all set, they are an infinity or NaN.
_EXPONENTS: dict[str, Any] = {"<f2": np.uint16(0x7C00), "<f4": np.uint32(0x7F800000)}
_header = lru_cache(1024)(
    npy_header
)  # numpy evaluates it as a literal, which is slow; most are alike


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


class StoredSample(NamedTuple):
    """A sample of a shard.

    Attributes:
        columns: by the names of `members.index_dtype`, but for the end of the key and the codes of labels.
        channels: width of the latents.
    """

    key: str
    columns: dict[str, Any]
    channels: int
    text: str
    verbatim: str
    labels: dict[str, str | None]


class InvalidSample(Exception):
    """An invalid member, described in a sentence without the tar's name, and its kind of `Problem`."""

    def __init__(self, sentence: str, kind: str = "unusable"):
        super().__init__(sentence)
        self.kind = kind


def read_shard(source: ShardFile) -> tuple[list[StoredSample], list[Problem]]:
    """The samples of a shard in order of first appearance, and what cannot be used in order of discovery."""
    problems: list[Problem] = []
    groups: dict[str, dict[str, Any]] = {}
    broken: set[str] = set()
    arrays = {array.suffix: array for array in members.ARRAYS}

    def report(sentence: str) -> None:
        problems.append(Problem("shard", "", sentence))

    def refuse(key: str, invalid: InvalidSample) -> None:
        problems.append(Problem(invalid.kind, key, str(invalid)))
        broken.add(key)

    for member in walk_members(source, report):
        folder, slash, basename = member.name.rpartition("/")
        stem, _, suffix = basename.partition(".")
        suffix = suffix.lower()
        if suffix not in members.suffixes() or not stem:
            continue
        # "tar -cf x.tar ." prefixes names with "./"; that is not part of a sample's name.
        key = (folder + slash + stem).removeprefix("./")
        found = groups.setdefault(key, {})
        try:
            if suffix in found:
                raise InvalidSample(f"sample '{key}' has .{suffix} twice; keys must be unique")
            found[suffix] = None
            if suffix == METADATA_SUFFIX:
                found[suffix] = _read_metadata(source, member)
            else:
                found[suffix] = _read_array(source, member, arrays[suffix])
        except InvalidSample as invalid:
            refuse(key, invalid)
    samples: list[StoredSample] = []
    for key, found in groups.items():
        if key not in broken:
            try:
                samples.append(_complete(key, found, samples[0].channels if samples else None))
            except InvalidSample as invalid:
                refuse(key, invalid)
    if not samples and not problems:
        needed = ", ".join(f"KEY.{suffix}" for suffix in members.suffixes())
        report(f"none of its members belongs to a sample; each sample needs {needed}")
    return samples, problems


def _complete(key: str, found: dict[str, Any], channels: int | None) -> StoredSample:
    """The sample of some members, which must all be there and fit each other and the channels of the shard."""
    if not members.is_key(key):
        raise InvalidSample(f"key {key!r} cannot name a sample; {members.KEY_RULE}")
    missing = [f".{suffix}" for suffix in members.suffixes() if suffix not in found]
    if missing:
        lacks = f"sample '{key}' is incomplete, it lacks {', '.join(missing)}"
        raise InvalidSample(f"{lacks}; complete or remove it", "incomplete")
    metadata, columns = found[METADATA_SUFFIX]
    hashes = metadata.get(HASHES_KEY)
    width, latents = found[members.ARRAYS[0].suffix]
    channels = channels or width
    if latents["frames"] == 0:
        raise InvalidSample(f"sample '{key}' has no latent frame; leave empty utterances out")
    for member in members.ARRAYS:
        width, own = found[member.suffix]
        where = f"the .{member.suffix} of sample '{key}'"
        if width != (member.width or channels):
            needed = member.width or channels
            raise InvalidSample(f"{where} is {width} wide, but {needed} is needed")
        if own.get("frames", latents["frames"]) != latents["frames"]:
            raise InvalidSample(
                f"{where} has {own['frames']} rows for {latents['frames']} latent frames; write it again"
            )
        written = hashes.get(member.suffix) if isinstance(hashes, dict) else None
        if written is not None and written != f"{own[f'{member.name}_hash']:016x}":
            raise InvalidSample(
                f"{where} is not as it was written (its {HASHES_KEY} in the JSON differs), so it is "
                "corrupt; copy or write the tar again",
                "changed",
            )
        columns |= own
    text, verbatim = metadata["text"], members.text_of(metadata, True)
    labels = {name: members.label_of(metadata, name) for name in LABELS}
    return StoredSample(key, columns, channels, text, verbatim, labels)


def _read_array(
    source: ShardFile, member: Member, array: members.ArrayMember
) -> tuple[int, dict[str, int]]:
    """(width, columns of the index) of an array."""
    # The header is judged before the rest is read: other files end in .npy, too, and may be huge.
    where, head = _read(source, member, _MAX_NPY_HEADER_BYTES)
    try:
        length = int.from_bytes(head[8:10], "little")
        end = 10 + length if head[6:8] == b"\1\0" else len(head)
        shape, is_fortran, dtype, start = _header(head[:end])
    except ValueError as error:
        raise InvalidSample(f"{where} is {error}; write it with numpy.save") from None
    exponent = _EXPONENTS.get(dtype.str)
    if exponent is None:
        raise InvalidSample(
            f"{where} has dtype {dtype.str!r}; only little-endian float16 and float32 are read, so "
            "convert it with astype(numpy.float16)"
        )
    is_shape = len(shape) == 2 and 0 <= shape[0] < 2**31 and 0 < shape[1] < 2**31
    if not is_shape or is_fortran:
        raise InvalidSample(
            f"{where} has shape {str(shape)[:60]}, fortran_order {is_fortran}; it must be (rows, width) "
            "in C order, so write it again through numpy.ascontiguousarray"
        )
    expected = start + shape[0] * shape[1] * dtype.itemsize
    if member.size != expected or expected > _MAX_ARRAY_BYTES:
        raise InvalidSample(
            f"{where} has {member.size} bytes, but its npy header (shape {shape}) needs {expected}, of "
            f"at most {_MAX_ARRAY_BYTES}; write it again"
        )
    values = memoryview(_read(source, member, member.size)[1])[start:]
    bits = np.frombuffer(values, exponent.dtype)
    if ((bits & exponent) == exponent).any():
        raise InvalidSample(f"{where} has values that are NaN or infinite", "not_finite")
    return shape[1], {
        array.length: shape[0],
        f"{array.name}_offset": member.offset + start,
        f"{array.name}_hash": xxhash.xxh3_64_intdigest(values),
        f"{array.name}_item_bytes": dtype.itemsize,
    }


def _read(source: ShardFile, member: Member, size: int) -> tuple[str, bytes]:
    """The member's name for messages, and its first bytes. What the disk cannot read is one member's
    problem; a server that cannot be reached is an error."""
    where = f"member '{member.name}'"
    if member.is_link:
        raise InvalidSample(
            f"{where} is a link; write the tar again with --dereference --hard-dereference"
        )
    try:
        return where, source.pread(min(size, member.size), member.offset)
    except InputError as error:
        if is_remote(source.path):
            raise
        raise InvalidSample(f"{where} cannot be read: {error}", "unreadable") from error


def _read_metadata(source: ShardFile, member: Member) -> tuple[dict[str, Any], dict[str, Any]]:
    """(object, columns of the index) of a JSON."""
    if member.size > _MAX_JSON_BYTES:
        raise InvalidSample(
            f"member '{member.name}' has {member.size} bytes, of at most {_MAX_JSON_BYTES}"
        )
    where, data = _read(source, member, member.size)
    try:
        metadata = parse_json(str(data, "utf-8"))
        text, verbatim = metadata["text"], members.text_of(metadata, True)
        columns = {
            "metadata_offset": member.offset,
            "metadata_bytes": len(data),
            "metadata_hash": xxhash.xxh3_64_intdigest(data),
            "text_bytes": len(text.encode("utf-8")),
            "text_chars": len(text),
            "verbatim_bytes": len(verbatim.encode("utf-8")),
            "verbatim_chars": len(verbatim),
            "weight": members.weight_of(metadata),
        }
        hashes = metadata.get(HASHES_KEY)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidSample(f'{where} is not a UTF-8 JSON object with a "text" string') from None
    written = hashes.get(METADATA_SUFFIX) if isinstance(hashes, dict) else None
    if written is not None and written != members.metadata_hash(metadata):
        raise InvalidSample(
            f"{where} is not as it was written, so it is corrupt; copy or write the tar again, or take "
            f'its key "{HASHES_KEY}" out if it was changed on purpose',
            "changed",
        )
    return metadata, columns
