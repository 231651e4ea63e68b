"""Write one shard: a tar of samples that any tar tool can read.

`members` defines what a sample consists of. To each JSON the writer adds "xxh3_64", hashes of the arrays
and of the JSON itself, by which the index knows a sample that was corrupted or changed on its way. Names follow
webdataset. Two writes of the same samples give the same bytes, and a shard is either complete or absent.
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

from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.members import HASHES_KEY, METADATA_SUFFIX
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file


@dataclass(frozen=True)
class Triplet:
    """One training sample as it is stored.

    Attributes:
        key: name within its shard; no dot in its last path component.
        latents, reference: (T, C) and (R, C) floating point, T > 0, R may be 0; stored as float16.
        metadata: JSON-serialisable; "text" (str) is required, other keys are kept.
        other_arrays: by name, what `members.ARRAYS` has besides these two.
    """

    key: str
    latents: np.ndarray
    reference: np.ndarray
    metadata: dict[str, Any] = field(default_factory=dict)
    other_arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {"latents": self.latents, "reference": self.reference, **self.other_arrays}


def write_shard(path: str | os.PathLike, samples: Iterable[Triplet]) -> None:
    """Write `samples`, which may come from a generator, to the tar file `path`."""
    keys: set[str] = set()
    channels: int | None = None
    with atomic_file(path) as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for sample in samples:
                if not members.is_key(sample.key):
                    raise InputError(
                        f"{path}: key '{sample.key}' cannot name a sample; {members.KEY_RULE}"
                    )
                if sample.key in keys:
                    raise InputError(f"{path}: key '{sample.key}' was given twice")
                keys.add(sample.key)
                channels = channels or np.shape(sample.latents)[-1]
                hashes = {}
                for member in members.ARRAYS:
                    half = _half(path, sample, member, channels)
                    hashes[member.suffix] = xxhash.xxh3_64_hexdigest(half.data)
                    buffer = io.BytesIO()
                    np.save(buffer, half, allow_pickle=False)
                    add_member(tar, f"{sample.key}.{member.suffix}", buffer.getvalue())
                where = f"{path}: metadata of sample '{sample.key}'"
                metadata = metadata_bytes(where, sample.metadata, hashes)
                add_member(tar, f"{sample.key}.{METADATA_SUFFIX}", metadata)
        if not keys:
            raise InputError(f"{path}: no samples were given; a shard needs at least one")


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Appends a file, whose header does not depend on who writes it and when."""
    # TarInfo's own defaults: mtime 0, uid 0, mode 0644, no user names.
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _half(
    path: str | os.PathLike, sample: Triplet, member: members.ArrayMember, channels: int
) -> np.ndarray:
    """A sample's array as it is stored, float16."""
    if member.name not in sample.arrays:
        raise InputError(f"{path}: sample '{sample.key}' has no {member.name}")
    array = np.asarray(sample.arrays[member.name])
    where = f"{path}: {member.name} of sample '{sample.key}'"
    width = member.width or channels
    if array.ndim != 2 or array.dtype.kind != "f" or array.shape[1] != width or not width:
        raise InputError(
            f"{where} has dtype {array.dtype} and shape {array.shape}; it must be floating point of "
            f"shape (rows, {width}), the same width in all samples of a shard"
        )
    if member.length == "frames" and len(array) != len(sample.latents) or not len(sample.latents):
        raise InputError(
            f"{where} has {len(array)} rows for {len(sample.latents)} latent frames; as many are "
            "needed, and at least one"
        )
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(array, dtype="<f2")
    if not np.isfinite(half).all():
        raise InputError(f"{where} has values that are not finite in float16")
    return half


def metadata_bytes(where: str, metadata: dict[str, Any], hashes: dict[str, str]) -> bytes:
    """The JSON as it is stored, with the hashes of its sample's arrays and of itself. `where`: for messages."""
    own = members.metadata_hash(metadata)
    if own is None or not isinstance(metadata.get("text"), str):
        raise InputError(f'{where} has no "text" string or cannot be written as utf-8 JSON')
    stored = {**metadata, HASHES_KEY: {**hashes, METADATA_SUFFIX: own}}
    return json.dumps(stored, ensure_ascii=False, sort_keys=True).encode("utf-8")
