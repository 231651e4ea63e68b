"""The index of one shard: where every sample's members lie, made once and stored next to the tar.

It has the offsets, a hash of every member, against which each later read is checked, and the lengths, labels and
characters of all samples. It is stored as `<tar>.idx`, or in the user's cache folder where the tar's cannot be
written, with the tar's size and modification time, and is made again when these differ or the file cannot be read.
Processes that start together may each make it: all rename the same bytes to it, so no lock is needed.

Corrupt samples are left out and listed in `problems`; what to do about them is the caller's choice.
"""

import hashlib
import io
import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from torchtitan.models.dit_tts.bounded import parse_array, parse_json, read_bytes
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.members import LABELS
from torchtitan.models.dit_tts.data.shard import Problem, read_shard
from torchtitan.models.dit_tts.data.storage import (
    RemoteSource,
    ShardFile,
    open_source,
    plain_name,
    sidecar_path,
)
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote, user_cache_folder, write_atomic

INDEX_VERSION = 4
_MAGIC = b"TTSINDEX"
# version, XXH3 of the member table, tar size, tar version, channels, samples, bytes of
# keys; before it stand the magic and the XXH3 of all that follows, behind it columns, keys and extras
_HEADER = struct.Struct("<QQQqQQQ")
_MAX_BYTES = 4 << 30  # of an index
_PREFIX_BYTES = len(_MAGIC) + 8
_COLUMN_KEY_BYTES = 32 + 8  # SHA-256 of the index, XXH3 of the stored array
# Threads that wait on disks or servers while indexes are opened.
_LOCAL_OPENERS, _REMOTE_OPENERS = 8, 32


@dataclass(frozen=True)
class ShardIndex:
    """Columns over the complete samples of one tar, in order of first appearance.

    Attributes:
        channels: width C of the latents in the tar; 0 where no sample is valid.
        tar_bytes, tar_version: size of the file it was made from, and its `ShardFile.version`.
        columns: (samples,) of `members.index_dtype()`.
        keys: utf-8 of all keys, joined.
        labels: for each of `LABELS`, its values in order of first appearance.
        characters, verbatim_characters: the distinct characters of all texts, and of all verbatim ones, in
            ascending order.
        problems: what could not be used, in order of discovery.
    """

    channels: int
    tar_bytes: int
    tar_version: int
    columns: np.ndarray = field(repr=False)
    keys: bytes = field(repr=False)
    labels: dict[str, list[str]] = field(repr=False)
    characters: str = field(repr=False)
    verbatim_characters: str = field(repr=False)
    problems: tuple[Problem, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def digest(self) -> bytes:
        """SHA-256 over the samples' keys, lengths and hashes; the same wherever and whenever the tar was copied."""
        digest = hashlib.sha256(struct.pack("<QQ", self.tar_bytes, self.channels))
        hashes = [f"{array.name}_hash" for array in members.ARRAYS]
        for name in [*members.length_columns(), *hashes, "metadata_hash", "key_end"]:
            digest.update(self.columns[name].tobytes())
        digest.update(self.keys)
        return digest.digest()


def load_index(tar_path: str) -> ShardIndex:
    """The index of a tar (a local path or URL): from its sidecar if that is fresh, else made and stored. Beside a
    remote tar, `<url>.idx` is used if it was made from as many bytes and one sample matches its hash."""
    with closing(open_source(tar_path)) as source:
        paths, tar = _sidecar_paths(tar_path), (source.size, source.version)
        for path in paths:
            index = _read_local(path)
            # Not its truth: one without samples is false, and as fresh.
            if index is not None and (index.tar_bytes, index.tar_version) == tar:
                return index
        index = _remote_sidecar(source) if isinstance(source, RemoteSource) else None
        if index is None:
            index = build_index(source)
        _write_first(paths, _sidecar_bytes(index))
        return index


def load_column(tar_path: str, digest: bytes, name: str) -> np.ndarray | None:
    """A derived column that `save_column` stored; None where there is none for these contents, or it is corrupt."""
    for path in _sidecar_paths(tar_path):
        try:
            stored = read_bytes(f"{path}.{name}")
            key, data = stored[:_COLUMN_KEY_BYTES], stored[_COLUMN_KEY_BYTES:]
            if key == digest + xxhash.xxh3_64_digest(data):
                return parse_array(data)
        except (OSError, ValueError):
            continue
    return None


def save_column(tar_path: str, digest: bytes, name: str, values: np.ndarray) -> None:
    """Store a derived column (samples, ...), such as token counts, next to the index. `name` must tell apart
    whatever the values depend on besides the shard."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    data = buffer.getvalue()
    paths = [f"{path}.{name}" for path in _sidecar_paths(tar_path)]
    _write_first(paths, digest + xxhash.xxh3_64_digest(data) + data)


def build_index(source: ShardFile) -> ShardIndex:
    """Read the tar once, from its start to its end."""
    samples, problems = read_shard(source)
    if not is_remote(source.path):
        after = os.stat(source.path)
        if (after.st_size, after.st_mtime_ns) != (source.size, source.version):
            raise InputError(
                f"{source.path}: changed while it was being indexed; start again when it is complete"
            )
    keys = [sample.key.encode("utf-8") for sample in samples]
    columns = np.zeros(len(samples), members.index_dtype())
    for name in samples[0].columns if samples else ():
        values = [sample.columns[name] for sample in samples]
        columns[name] = np.array(values, columns.dtype[name])
    columns["key_end"] = np.cumsum([len(key) for key in keys], dtype=np.int64)
    labels = {}
    for name in LABELS:
        found = [sample.labels[name] for sample in samples]
        labels[name] = [label for label in dict.fromkeys(found) if label is not None]
        codes = {None: -1} | {label: code for code, label in enumerate(labels[name])}
        columns[f"{name}_code"] = [codes[label] for label in found]
    return ShardIndex(
        samples[0].channels if samples else 0,
        source.size,
        source.version,
        columns,
        b"".join(keys),
        labels,
        "".join(sorted(set().union(*(sample.text for sample in samples)))),
        "".join(sorted(set().union(*(sample.verbatim for sample in samples)))),
        tuple(problems),
    )


def _sidecar_paths(tar_path: str) -> list[str]:
    """Return the possible paths of a tar's index, in order of preference."""
    real = plain_name(tar_path) if is_remote(tar_path) else os.path.realpath(tar_path)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:20]
    cached = f"{user_cache_folder('index')}/{digest}-{os.path.basename(real)[:100]}.idx"
    return [cached] if is_remote(tar_path) else [tar_path + ".idx", cached]


def _write_first(paths: list[str], content: bytes) -> None:
    """Write to the first path that takes it; where none does, the next start makes it again."""
    for path in paths:
        try:
            return write_atomic(path, content)
        except OSError:
            continue


def _sidecar_bytes(index: ShardIndex) -> bytes:
    """The same wherever the tar lies: columns, keys, and the rest as JSON."""
    of_tar = index.tar_bytes, index.tar_version, index.channels
    header = _HEADER.pack(INDEX_VERSION, _members_hash(), *of_tar, len(index), len(index.keys))
    extras = {
        "labels": index.labels,
        "characters": index.characters,
        "verbatim_characters": index.verbatim_characters,
        "problems": [list(problem) for problem in index.problems],
    }
    extras_json = json.dumps(extras, sort_keys=True).encode("ascii")
    content = header + index.columns.tobytes() + index.keys + extras_json
    return _MAGIC + xxhash.xxh3_64_digest(content) + content


def _members_hash() -> int:
    return xxhash.xxh3_64_intdigest(repr((members.ARRAYS, members.index_dtype().descr)).encode())


def _read_local(path: str) -> ShardIndex | None:
    try:
        return _parse_sidecar(read_bytes(path, _MAX_BYTES))
    except (OSError, ValueError):
        return None


def _remote_sidecar(source: RemoteSource) -> ShardIndex | None:
    """The index next to a remote tar, if the last sample's JSON matches its hash."""
    try:
        sidecar = open_source(sidecar_path(source.path))
    except InputError:
        return None  # many tars have none, and servers differ in how they refuse
    with closing(sidecar):
        if sidecar.pread(len(_MAGIC), 0) != _MAGIC:
            return None  # some servers send the tar itself for any name
        index = _parse_sidecar(sidecar.pread(sidecar.size, 0))
    if not index or index.tar_bytes != source.size:
        return None  # one without samples has nothing to verify it by
    last = index.columns[-1]
    start = int(last["metadata_offset"])
    data = source.fetch(start, start + int(last["metadata_bytes"]))
    if xxhash.xxh3_64_intdigest(data) != int(last["metadata_hash"]):
        return None
    return replace(index, tar_version=source.version)


def _parse_sidecar(data: bytes) -> ShardIndex | None:
    """The stored index, or None where it is of another version or corrupt."""
    content = memoryview(data)[_PREFIX_BYTES:]
    if data[:_PREFIX_BYTES] != _MAGIC + xxhash.xxh3_64_digest(content):
        return None
    header = _HEADER.unpack_from(content) if len(content) >= _HEADER.size else ()
    if header[:2] != (INDEX_VERSION, _members_hash()):
        return None
    *of_tar, samples, keys_bytes = header[2:]
    dtype = members.index_dtype()
    keys_at = _HEADER.size + samples * dtype.itemsize
    try:
        columns = np.frombuffer(content, dtype, samples, _HEADER.size)
        keys = bytes(content[keys_at : keys_at + keys_bytes])
        extras = parse_json(bytes(content[keys_at + keys_bytes :]))
        problems = tuple(Problem(*problem) for problem in extras["problems"])
        tar_bytes, tar_version, channels = of_tar
        texts = extras["characters"], extras["verbatim_characters"]
        index = ShardIndex(
            channels, tar_bytes, tar_version, columns, keys, extras["labels"], *texts, problems
        )
        return index if _is_possible(index) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _is_possible(index: ShardIndex) -> bool:
    """True if an index, which may come with a stranger's shards, names nothing outside its shard."""
    columns, keys = index.columns, np.frombuffer(index.keys, np.uint8)
    ends = columns["key_end"]
    starts = np.concatenate([[0], ends[:-1]])
    stops = [columns["metadata_offset"] + columns["metadata_bytes"]]
    possible: list[Any] = [index.channels < 2**24, columns["metadata_offset"] >= 0]
    possible += [columns["metadata_bytes"] >= 0, starts < ends, ends <= len(keys)]
    for array in members.ARRAYS:
        item_bytes, offset = columns[f"{array.name}_item_bytes"], columns[f"{array.name}_offset"]
        rows = columns[array.length].astype(np.int64)
        stops.append(offset + rows * (array.width or index.channels) * item_bytes)
        possible += [np.isin(item_bytes, (2, 4)), offset >= 0, rows >= 0]
    possible += [stop <= index.tar_bytes for stop in stops]
    for name in LABELS:
        codes = columns[f"{name}_code"]
        possible += [codes >= -1, codes < len(index.labels[name])]
        possible.append(all(isinstance(value, str) for value in index.labels[name]))
    texts = index.characters, index.verbatim_characters, *sum(map(list, index.problems), [])
    possible.append(all(isinstance(text, str) for text in texts))
    if not all(np.all(each) for each in possible):
        return False
    # By a key files are named: no absolute path and no folder above.
    if len(keys) and (keys[starts] == ord("/")).any():
        return False
    suspicious = (
        zip(starts, ends) if b".." in index.keys else ()
    )  # a million keys are not cut for nothing
    return all(members.is_key(index.keys[start:end].decode()) for start, end in suspicious)


def load_indexes(tar_paths: list[str], part: tuple[int, int]) -> list[ShardIndex]:
    """The indexes of several shards. `part`: see `open_dataset`."""
    number, count = part
    first = len(tar_paths) * number // count
    rotated = tar_paths[first:] + tar_paths[:first]
    openers = _REMOTE_OPENERS if any(map(is_remote, tar_paths)) else _LOCAL_OPENERS
    with ThreadPoolExecutor(min(openers, len(tar_paths)), thread_name_prefix="index") as pool:
        loading = pool.map(load_index, rotated)
        shown = {"unit": "shard", "delay": 2, "disable": number > 0}  # stored ones need no bar
        indexes = list(tqdm(loading, "opening shards", len(rotated), **shown))
    return indexes[len(indexes) - first :] + indexes[: len(indexes) - first]


def joined_labels(indexes: Sequence[ShardIndex], name: str) -> tuple[np.ndarray, list[str]]:
    """Each shard's codes of a label, in the codes of one table for all."""
    table: dict[str, int] = {}
    codes = []
    for index in indexes:
        joined = [table.setdefault(value, len(table)) for value in index.labels[name]]
        mapping = np.array([*joined, -1], np.int32)  # code -1 takes the last
        codes.append(mapping[index.columns[f"{name}_code"]])
    return np.concatenate(codes), list(table)


def count_corrupt_samples(indexes: Sequence[ShardIndex]) -> int:
    """Corrupt samples of shards. A tar that is itself corrupt is taken to have had as many samples as the largest."""
    largest = max(len(index) + len(index.problems) for index in indexes)
    return sum(
        largest - len(index)
        if any(problem.kind == "shard" for problem in index.problems)
        else len(index.problems)
        for index in indexes
    )
