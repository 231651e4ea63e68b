"""Write one archive shard: a tar of triplets that any tar tool can read.

A triplet of key ``utt0001`` is three members, in this order::

    utt0001.npy       float16 (T, C)   latents of the utterance
    utt0001.ref.npy   float16 (R, C)   latents of a reference by the same speaker
    utt0001.json      utf-8 JSON       {"text": ..., "target_duration": seconds, ...}

To the JSON comes ``"xxh3_64"``, hashes of the arrays and of the JSON itself, by which the index
knows a sample that was damaged on its way, or was changed.

Names follow webdataset: the key is the member's name up to the first dot of
its basename. Two writes of the same samples give the same bytes, so a shard
can be compared by checksum, and a shard is either whole or absent.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file

LATENTS_SUFFIX = "npy"
REFERENCE_SUFFIX = "ref.npy"
METADATA_SUFFIX = "json"
HASHES_KEY = "xxh3_64"
"""in the JSON: suffix of a member -> XXH3 hash, 16 hex digits, of an array's data behind its npy
header or of ``canonical_json``"""


@dataclass(frozen=True)
class Triplet:
    """One training sample as it is stored.

    Attributes:
        key: name within its shard; no dot in its last path component.
        latents: (T, C) floating point, T > 0 frames; stored as float16.
        reference: (R, C) floating point; R = 0 means "no reference"; stored as float16.
        metadata: JSON-serialisable; ``"text"`` (str) is required, other keys are kept.
    """

    key: str
    latents: np.ndarray
    reference: np.ndarray
    metadata: dict[str, Any] = field(default_factory=dict)


def write_shard(path: str | os.PathLike, samples: Iterable[Triplet]) -> None:
    """Write ``samples`` to the tar file ``path``: deterministic bytes, atomic.

    Samples may come from a generator: one is held in memory at a time.

    Raises:
        InputError: a sample that the reader would refuse, or no sample at all.
    """
    keys: set[str] = set()
    width: int | None = None
    with atomic_file(path) as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for sample in samples:
                _check_key(path, sample.key, keys)
                width = _check_arrays(path, sample, width)
                hashes = {}
                for suffix, array in (
                    (LATENTS_SUFFIX, sample.latents),
                    (REFERENCE_SUFFIX, sample.reference),
                ):
                    half = _half(path, sample.key, array)
                    hashes[suffix] = xxhash.xxh3_64_hexdigest(half)
                    _add(tar, f"{sample.key}.{suffix}", _npy_bytes(half))
                metadata = _metadata_bytes(path, sample, hashes)
                keys.add(sample.key)
                _add(tar, f"{sample.key}.{METADATA_SUFFIX}", metadata)
        if not keys:
            raise InputError(f"{path}: no samples were given to write; a shard needs at least one.")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    # TarInfo's own defaults (mtime 0, uid 0, mode 0644, no user names) are what keeps
    # the bytes independent of who writes and when.
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _half(path: str | os.PathLike, key: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(array, dtype="<f2")
    if not np.isfinite(half).all():
        raise InputError(
            f"{path}: sample '{key}' has values that are not finite in float16; "
            "latents must be finite and below 65504 in magnitude."
        )
    return half


def _npy_bytes(half: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, half, allow_pickle=False)
    return buffer.getvalue()


def _check_key(path: str | os.PathLike, key: str, seen: set[str]) -> None:
    basename = key.rsplit("/", 1)[-1]
    folders = key.split("/")[:-1]
    if not basename or "." in basename or "\0" in key or {"", ".", ".."} & set(folders):
        raise InputError(
            f"{path}: key '{key}' cannot name a sample; use a relative name whose last component "
            "is not empty and has no dot (what follows the first dot is the member's kind)."
        )
    if key in seen:
        raise InputError(
            f"{path}: key '{key}' was given twice; keys must be unique within a shard."
        )


def _check_arrays(path: str | os.PathLike, sample: Triplet, width: int | None) -> int:
    for name, array in (("latents", sample.latents), ("reference", sample.reference)):
        array = np.asarray(array)
        if array.ndim != 2 or array.dtype.kind != "f" or array.shape[1] == 0:
            raise InputError(
                f"{path}: {name} of sample '{sample.key}' are {array.dtype} of shape "
                f"{array.shape}; they must be floating point of shape (frames, channels)."
            )
        width = array.shape[1] if width is None else width
        if array.shape[1] != width:
            raise InputError(
                f"{path}: {name} of sample '{sample.key}' have {array.shape[1]} channels where "
                f"the shard has {width}; all arrays of a shard must have the same width."
            )
    if sample.latents.shape[0] == 0:
        raise InputError(
            f"{path}: sample '{sample.key}' has no latent frame; leave empty utterances out."
        )
    return width


def canonical_json(metadata: dict[str, Any]) -> bytes:
    """The JSON that stands for its own hash: of all but the hashes, keys sorted, utf-8.

    Raises:
        ValueError, TypeError: what JSON has no form for; NaN is refused, as other readers would.
    """
    rest = {name: value for name, value in metadata.items() if name != HASHES_KEY}
    return json.dumps(rest, ensure_ascii=False, sort_keys=True, allow_nan=False).encode("utf-8")


def _metadata_bytes(path: str | os.PathLike, sample: Triplet, hashes: dict[str, str]) -> bytes:
    if not isinstance(sample.metadata.get("text"), str):
        raise InputError(
            f"{path}: metadata of sample '{sample.key}' has no \"text\" string; every sample needs "
            "one."
        )
    try:
        own = xxhash.xxh3_64_hexdigest(canonical_json(sample.metadata))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{path}: metadata of sample '{sample.key}' cannot be written as utf-8 JSON ({error}); "
            "use strings, finite numbers, booleans, lists and dicts."
        ) from error
    metadata = {**sample.metadata, HASHES_KEY: {**hashes, METADATA_SUFFIX: own}}
    return json.dumps(metadata, ensure_ascii=False, sort_keys=True).encode("utf-8")
