"""The triplets of one tar: read in one pass, grouped by key, each array and JSON looked at once.

Whatever cannot be used becomes a ``Problem`` and the rest is kept, so that one damaged sample costs
one sample. Sentences have no path: an index is the same wherever its tar lies.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from torchtitan.models.dit_tts.data.shard_writer import (
    HASHES_KEY,
    LATENTS_SUFFIX,
    METADATA_SUFFIX,
    REFERENCE_SUFFIX,
    canonical_json,
)
from torchtitan.models.dit_tts.data.storage import ShardFile
from torchtitan.models.dit_tts.data.tar_reader import Member, shown, walk_members
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote

LABELS = ("speaker", "language", "quality", "class")
"""keys of the JSON whose values the index keeps"""

_SUFFIXES = {
    LATENTS_SUFFIX.encode(): LATENTS_SUFFIX,
    REFERENCE_SUFFIX.encode(): REFERENCE_SUFFIX,
    METADATA_SUFFIX.encode(): METADATA_SUFFIX,
}
_MAX_NPY_HEADER_BYTES = 1 << 16
_MAX_JSON_BYTES = 16 << 20
_ITEM_BYTES = {"<f2": 2, "<f4": 4}
# Bit patterns with all exponent bits set are infinities and NaNs.
_EXPONENTS = {2: np.uint16(0x7C00), 4: np.uint32(0x7F800000)}
# What every numpy writes; anything else goes through the slow literal parser.
_PLAIN_NPY_HEADER = re.compile(
    rb"\{'descr': '(<f[24])', 'fortran_order': False, 'shape': \((\d{1,9}), (\d{1,9})\), \} *\n"
)


class Problem(NamedTuple):
    """What is wrong.

    kind: "shard" (the tar itself), or of a sample "incomplete", "not_finite", "changed" (not what
    its writer noted), "unreadable" (the disk) or "unusable". key: the sample's, "" where none can be named.
    """

    kind: str
    key: str
    sentence: str


class ArrayMember(NamedTuple):
    offset: int
    frames: int
    channels: int
    item_bytes: int
    hash: int


class MetadataMember(NamedTuple):
    offset: int
    size: int
    hash: int
    text: str
    text_bytes: int
    labels: dict[str, str]
    array_hashes: dict[str, str]


class SampleMembers(NamedTuple):
    key: str
    latents: ArrayMember
    reference: ArrayMember
    metadata: MetadataMember


@dataclass
class ShardContents:
    """All that one pass over a tar finds."""

    channels: int = 0
    samples: list[SampleMembers] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    characters: str = ""


class _Unusable(Exception):
    """A member that cannot be used, in a sentence without the tar's name, and its kind."""

    def __init__(self, sentence: str, kind: str = "unusable"):
        super().__init__(sentence)
        self.kind = kind


def read_shard(source: ShardFile) -> ShardContents:
    """Read a tar from start to end."""
    contents = ShardContents()

    def tell(sentence: str) -> None:
        contents.problems.append(Problem("shard", "", sentence))

    groups: dict[str, dict[str, Any]] = {}
    broken: set[str] = set()
    for member in walk_members(source, tell):
        folder, slash, basename = member.name.rpartition(b"/")
        stem, _, suffix = basename.partition(b".")
        kind = _SUFFIXES.get(suffix.lower())
        if kind is None or not stem:
            continue
        # "tar -cf x.tar ." prefixes names with "./"; that is not part of a sample's name.
        key = shown((folder + slash + stem).removeprefix(b"./"))
        members = groups.setdefault(key, {})
        try:
            if kind in members:
                raise _Unusable(
                    f"sample '{key}' has the member .{kind} twice; keys must be unique within a "
                    "tar."
                )
            members[kind] = None
            if member.is_link:
                raise _Unusable(
                    f"member '{shown(member.name)}' is a link, which cannot be read by offset; "
                    "write the tar again with --dereference --hard-dereference."
                )
            if kind == METADATA_SUFFIX:
                members[kind] = _read_metadata(source, key, member)
            else:
                members[kind] = _read_array(source, member)
        except _Unusable as unusable:
            contents.problems.append(Problem(unusable.kind, key, str(unusable)))
            broken.add(key)
    _take_complete(contents, groups, broken)
    if not contents.samples and not contents.problems:
        tell(
            f"none of its members belongs to a sample; each sample needs KEY.{LATENTS_SUFFIX}, "
            f"KEY.{REFERENCE_SUFFIX} and KEY.{METADATA_SUFFIX}."
        )
    return contents


def _take_complete(
    contents: ShardContents, groups: dict[str, dict[str, Any]], broken: set[str]
) -> None:
    """The samples whose three members fit each other; the others become problems."""
    characters: set[str] = set()
    for key, members in groups.items():
        if key in broken:
            continue
        try:
            missing = [f".{kind}" for kind in _SUFFIXES.values() if kind not in members]
            if missing:
                raise _Unusable(
                    f"sample '{key}' is incomplete, it lacks {', '.join(missing)}; complete or "
                    "remove it.",
                    "incomplete",
                )
            sample = SampleMembers(
                key,
                members[LATENTS_SUFFIX],
                members[REFERENCE_SUFFIX],
                members[METADATA_SUFFIX],
            )
            contents.channels = contents.channels or sample.latents.channels
            _check_sample(sample, contents.channels)
            contents.samples.append(sample)
            characters.update(sample.metadata.text)
        except _Unusable as unusable:
            contents.problems.append(Problem(unusable.kind, key, str(unusable)))
    contents.characters = "".join(sorted(characters))


def _check_sample(sample: SampleMembers, channels: int) -> None:
    key, latents, reference = sample.key, sample.latents, sample.reference
    if latents.frames == 0:
        raise _Unusable(f"sample '{key}' has no latent frame; leave empty utterances out.")
    if {latents.channels, reference.channels} != {channels}:
        raise _Unusable(
            f"the arrays of sample '{key}' are {latents.channels} and {reference.channels} wide "
            f"where the tar's first is {channels}; all arrays of a dataset must have the same "
            "width."
        )
    for kind, array in ((LATENTS_SUFFIX, latents), (REFERENCE_SUFFIX, reference)):
        written = sample.metadata.array_hashes.get(kind)
        if written is not None and written != f"{array.hash:016x}":
            raise _Unusable(
                f"the .{kind} of sample '{key}' is not the one that was written (its {HASHES_KEY} "
                f"in the JSON is {written}, found {array.hash:016x}), so it is damaged; copy or "
                "write the tar again.",
                "changed",
            )


def _read_array(source: ShardFile, member: Member) -> ArrayMember:
    where = f"member '{shown(member.name)}'"
    # The header is judged before the rest is read: other files end in .npy, too, and may be huge.
    head = member.head
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise _Unusable(f"{where} is not an npy array; write it with numpy.save.")
    wide = head[6] >= 2  # format 1 has a 16-bit header length, 2 and 3 a 32-bit one
    start = 12 if wide else 10
    data_start = start + int.from_bytes(head[8:start], "little")
    if data_start > min(member.size, _MAX_NPY_HEADER_BYTES):
        raise _Unusable(
            f"{where} has an npy header longer than the member or {_MAX_NPY_HEADER_BYTES} bytes; "
            "write it again."
        )
    if data_start > len(head):
        head = _read(source, member, data_start)
    plain = _PLAIN_NPY_HEADER.fullmatch(head, start, data_start)
    if plain:
        descr, shape = plain[1].decode(), (int(plain[2]), int(plain[3]))
        if shape[1] == 0:
            raise _Unusable(f"{where} has shape {shape}; it must be (frames, channels).")
    else:
        descr, shape = _parse_npy_header(head[start:data_start], where)
    item_bytes = _ITEM_BYTES[descr]
    expected = data_start + shape[0] * shape[1] * item_bytes
    if member.size != expected:
        raise _Unusable(
            f"{where} has {member.size} bytes where its npy header (shape {shape}) needs "
            f"{expected}; write it again."
        )
    data = _read(source, member, member.size)
    bits = np.frombuffer(data, np.uint16 if item_bytes == 2 else np.uint32, offset=data_start)
    exponent = _EXPONENTS[item_bytes]
    if ((bits & exponent) == exponent).any():
        raise _Unusable(
            f"{where} has values that are NaN or infinite; encode the utterance again or leave it "
            "out.",
            "not_finite",
        )
    array_hash = xxhash.xxh3_64_intdigest(memoryview(data)[data_start:])
    return ArrayMember(member.offset + data_start, shape[0], shape[1], item_bytes, array_hash)


def _parse_npy_header(text: bytes, where: str) -> tuple[str, tuple[int, int]]:
    try:
        header = ast.literal_eval(text.decode("latin-1").strip())
        descr, fortran_order, shape = header["descr"], header["fortran_order"], header["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        raise _Unusable(
            f"{where} has an npy header that cannot be read; write it again with numpy.save."
        ) from None
    if not isinstance(descr, str) or descr not in _ITEM_BYTES:
        raise _Unusable(
            f"{where} has dtype {descr!r}; only little-endian float16 and float32 are read "
            "(pickled objects never are), so convert it with astype(numpy.float16)."
        )
    whole = isinstance(shape, tuple) and all(
        isinstance(length, int) and 0 <= length < 2**31 for length in shape
    )
    if not whole or len(shape) != 2 or shape[1] == 0:
        raise _Unusable(f"{where} has shape {str(shape)[:60]}; it must be (frames, channels).")
    if fortran_order:
        raise _Unusable(
            f"{where} is stored in Fortran order (a transposed array was saved); "
            "write it again through numpy.ascontiguousarray."
        )
    return descr, shape


def _read(source: ShardFile, member: Member, size: int) -> bytes:
    """The first bytes of a member. What the disk cannot give is one member's problem; a server that
    cannot be reached is nobody's damage."""
    try:
        return source.pread(size, member.offset)
    except InputError as error:
        if is_remote(source.path):
            raise
        raise _Unusable(
            f"member '{shown(member.name)}' cannot be read: {error}", "unreadable"
        ) from error


def _read_metadata(source: ShardFile, key: str, member: Member) -> MetadataMember:
    if member.size > _MAX_JSON_BYTES:
        raise _Unusable(
            f"the JSON of sample '{key}' has {member.size} bytes; at most {_MAX_JSON_BYTES} are read."
        )
    data = member.head if member.size <= len(member.head) else _read(source, member, member.size)
    try:
        metadata = json.loads(str(data, "utf-8"))
        text = metadata["text"]
        text_bytes = len(text.encode("utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _Unusable(
            f"the JSON of sample '{key}' is no utf-8 object with a \"text\" string; every sample "
            "needs its text."
        ) from None
    hashes = metadata.get(HASHES_KEY)
    if not isinstance(hashes, dict):
        hashes = {}
    written = hashes.get(METADATA_SUFFIX)
    if written is not None and written != _hash_of(metadata):
        raise _Unusable(
            f"the JSON of sample '{key}' is not the one that was written, so it is damaged; copy "
            f'or write the tar again, or take its key "{HASHES_KEY}" out if it was changed on '
            "purpose.",
            "changed",
        )
    return MetadataMember(
        offset=member.offset,
        size=member.size,
        hash=xxhash.xxh3_64_intdigest(data),
        text=text,
        text_bytes=text_bytes,
        labels={name: label for name in LABELS if (label := label_of(metadata, name)) is not None},
        array_hashes=hashes,
    )


def _hash_of(metadata: dict[str, Any]) -> str | None:
    """What its writer would note; None for what it would not write."""
    try:
        return xxhash.xxh3_64_hexdigest(canonical_json(metadata))
    except (TypeError, ValueError, RecursionError):
        return None


def label_of(metadata: Mapping[str, Any], name: str) -> str | None:
    """A sample's value of a label as text; None where it has none. Numbers are names, too."""
    value = metadata.get(name)
    if isinstance(value, str):
        return value or None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None
