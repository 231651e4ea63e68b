"""One shard's text features in a safetensors file: written as a stream, read by offset.

    ends      (n,) int64    row of `features` behind each sample's last
    hashes    (n,) uint64   XXH3 of the bytes of each sample's rows; 0 where it has no features
    tokens    (n,) int32    ids that the tokenizer gives for each sample's text
    features  (rows, h)     the encoder's last hidden states, text after text

n samples in the order of the shard's index. The features come last, so that they can be written while
they are made; safetensors' own writer would need all of them in memory. Its readers read the file.
The header's metadata says what the features were made with, and a hash of that and the three tables.
"""

import fcntl
import json
import os
import re
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file, temporary_files

FORMAT_VERSION = 1
SUFFIX = ".safetensors"

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 1 << 20
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TABLES = {"ends": ("I64", "<i8"), "hashes": ("U64", "<u8"), "tokens": ("I32", "<i4")}
_HASH_LATER = "0" * 16
_BEGINNING_SECONDS = 5.0
# Rows of a file system's name that people can still tell apart.
_MOST_SLUG = 80


@dataclass(frozen=True)
class FeatureKind:
    """What features are made with; everything but the shard."""

    model: str
    """as `HFEncoderSpec.model`"""

    encoder_fingerprint: str | None
    """of the encoder's config, weights and precision; None: the weights are not on this machine"""

    text_fingerprint: str
    """of the encoder's tokenizer"""

    encoder_dtype: str
    """precision that the encoder computes in"""

    stored_dtype: str
    """precision of the features: float32, bfloat16 or float16"""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.stored_dtype)

    @property
    def slug(self) -> str:
        """What the names of all folders with this model's features begin with."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(self.model)).lstrip(".-")
        return name[:_MOST_SLUG] or "encoder"

    @property
    def key(self) -> str:
        """16 hex digits: equal for equal features of equal texts."""
        assert self.encoder_fingerprint is not None
        parts = [FORMAT_VERSION, self.encoder_fingerprint, self.text_fingerprint, self.stored_dtype]
        return sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def folder_name(self) -> str:
        return f"{self.slug}-{self.key}"


@dataclass(frozen=True)
class FeatureFile:
    """A feature file's tables; its rows are read by `TextFeatures`."""

    path: str
    bytes: int
    kind: FeatureKind
    shard_digest: str
    width: int
    features_offset: int
    ends: np.ndarray
    hashes: np.ndarray
    tokens: np.ndarray

    @property
    def row_bytes(self) -> int:
        return self.width * self.kind.torch_dtype.itemsize

    def fits(self, kind: FeatureKind, shard_digest: str) -> bool:
        """Whether it is of this shard, made with the same."""
        return (self.kind.key, self.shard_digest) == (kind.key, shard_digest)


def write_feature_file(
    path: str,
    kind: FeatureKind,
    shard_digest: str,
    tokens: np.ndarray,
    has_features: np.ndarray,
    width: int,
    samples: Iterable[torch.Tensor],
) -> None:
    """Writes one shard's features; the file appears whole or not at all.

    A fitting file that another job has finished meanwhile is kept.

    Args:
        tokens: (n,) ids of each sample's text.
        has_features: (n,) bool, which of them `samples` has.
        width: h.
        samples: features (tokens, h) on the CPU in the stored dtype, in the samples' order.
    """
    ends = np.cumsum(np.where(has_features, tokens, 0), dtype=np.int64)
    hashes = np.zeros(len(tokens), np.uint64)
    rows = int(ends[-1]) if len(ends) else 0
    keep_first = partial(_publish, kind=kind, shard_digest=shard_digest)
    with atomic_file(path, keep_first) as file:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)  # others hold it for a moment only
        file.write(_header(kind, shard_digest, len(tokens), rows, width, _HASH_LATER))
        start = file.tell()
        tables_bytes = sum(len(tokens) * np.dtype(dtype).itemsize for _, dtype in _TABLES.values())
        file.write(bytes(tables_bytes))
        numbers = iter(np.flatnonzero(has_features).tolist())
        for number, features in zip(numbers, samples, strict=True):
            assert features.shape == (tokens[number], width) and features.dtype == kind.torch_dtype
            data = bytes_of(features)
            hashes[number] = xxhash.xxh3_64_intdigest(data)
            file.write(data)
        tables = _tables_bytes(ends, hashes, tokens)
        assert len(tables) == tables_bytes
        file.seek(0)
        tables_hash = _tables_hash(kind, shard_digest, tables)
        file.write(_header(kind, shard_digest, len(tokens), rows, width, tables_hash))
        assert file.tell() == start
        file.write(tables)


def _publish(temporary: str, path: str, kind: FeatureKind, shard_digest: str) -> None:
    """Gives a whole file its name, where no fitting one is: a job that has read its tables would find
    every sample damaged in another machine's, as these differ in a few bits."""
    try:
        os.link(temporary, path)  # unlike a rename, it replaces nothing
    except OSError:  # there is a file, or the file system has no hard links
        found = read_feature_file(path)
        if found is None or not found.fits(kind, shard_digest):
            os.replace(temporary, path)
            return
    os.unlink(temporary)


def remove_abandoned(path: str) -> None:
    """Removes what killed writers of this file left, which can be as large as the file. A living one
    holds a lock, but for the moment in which it begins."""
    for left in temporary_files(path):
        # On NFS a lock for one alone takes a file that is open for writing.
        with suppress(OSError), open(left, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > _BEGINNING_SECONDS:
                os.unlink(left)


def bytes_of(features: torch.Tensor) -> np.ndarray:
    """The tensor's memory as bytes; numpy has no bfloat16."""
    return features.contiguous().view(torch.uint8).numpy().reshape(-1)


def _tables_bytes(ends: np.ndarray, hashes: np.ndarray, tokens: np.ndarray) -> bytes:
    columns = {"ends": ends, "hashes": hashes, "tokens": tokens}
    return b"".join(columns[name].astype(dtype).tobytes() for name, (_, dtype) in _TABLES.items())


def _tables_hash(kind: FeatureKind, shard_digest: str, tables: bytes) -> str:
    """Of the tables and of what they belong to: a damaged name is damage, not another encoder's."""
    return xxhash.xxh3_64_hexdigest(json.dumps([asdict(kind), shard_digest]).encode() + tables)


def _header(
    kind: FeatureKind, shard_digest: str, samples: int, rows: int, width: int, tables_hash: str
) -> bytes:
    """safetensors' header: its length, JSON, blanks to a multiple of 8 bytes."""
    header: dict[str, Any] = {
        "__metadata__": {
            "model": kind.model,
            "encoder_fingerprint": kind.encoder_fingerprint,
            "text_fingerprint": kind.text_fingerprint,
            "encoder_dtype": kind.encoder_dtype,
            "stored_dtype": kind.stored_dtype,
            "shard_digest": shard_digest,
            "version": str(FORMAT_VERSION),
            "tables_hash": tables_hash,
        }
    }
    offset = 0
    for name, (code, dtype) in _TABLES.items():
        end = offset + samples * np.dtype(dtype).itemsize
        header[name] = {"dtype": code, "shape": [samples], "data_offsets": [offset, end]}
        offset = end
    end = offset + rows * width * kind.torch_dtype.itemsize
    header["features"] = {
        "dtype": _NAMES[kind.torch_dtype],
        "shape": [rows, width],
        "data_offsets": [offset, end],
    }
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def read_feature_file(path: str) -> FeatureFile | None:
    """The tables of a feature file; None where there is none, or not a whole one of this version.

    Raises:
        InputError: the file is there and cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return _parse(path, file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"{path}: text features that cannot be read ({error.strerror}); mend that or delete the "
            f"file, and it is made again"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None  # damaged where it matters; as good as absent


def _parse(path: str, file: BinaryIO) -> FeatureFile | None:
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    if length > _MOST_HEADER_BYTES:
        return None
    header = json.loads(file.read(length))
    said = header["__metadata__"]
    if said["version"] != str(FORMAT_VERSION):
        return None
    names = ("model", "encoder_fingerprint", "text_fingerprint", "encoder_dtype", "stored_dtype")
    kind = FeatureKind(*(said[name] for name in names))
    (samples,), (rows, width) = header["ends"]["shape"], header["features"]["shape"]
    whole = _header(kind, said["shard_digest"], samples, rows, width, said["tables_hash"])
    if _LENGTH.size + length != len(whole) or json.loads(whole[_LENGTH.size :]) != header:
        return None
    offset = _LENGTH.size + length
    stop = offset + header["features"]["data_offsets"][1]
    if os.fstat(file.fileno()).st_size != stop:
        return None
    tables = file.read(header["features"]["data_offsets"][0])
    if _tables_hash(kind, said["shard_digest"], tables) != said["tables_hash"]:
        return None
    columns = {}
    for name, (_, dtype) in _TABLES.items():
        columns[name] = np.frombuffer(tables, dtype, samples, header[name]["data_offsets"][0])
    features_offset = offset + len(tables)
    return FeatureFile(path, stop, kind, said["shard_digest"], width, features_offset, **columns)
