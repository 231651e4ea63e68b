"""The latents of one chunk of recordings, between encoding and the shards: one file, whole or absent.

    magic, bytes and XXH3 hash of the header | header, JSON | float16 (frames, channels)

The header comes first, so that a run that goes on reads what was dropped without the latents, and a
reference is read by its offset alone.
"""

import json
import os
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file

_MAGIC = b"TTSCHNK1"
_PREFIX = struct.Struct("<8sQQ")
FILES_A_FOLDER = 1000


@dataclass(frozen=True)
class EncodedSample:
    """One kept recording; `start` counts the latent frames before it in the file."""

    key: str
    speaker: str
    split: str
    start: int
    frames: int
    reference_frames: int  # of a reference that the source gave, behind its frames; usually 0
    metadata: dict[str, Any]


@dataclass
class ChunkHeader:
    """What a chunk came to."""

    channels: int
    samples: list[EncodedSample] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> recordings
    problems: list[list[str]] = field(default_factory=list)  # [key, sentence] of undecodable ones
    counts: dict[str, float] = field(default_factory=dict)  # what was done to the kept ones
    digest: str = ""  # of the recordings' contents
    latents_hash: str = ""  # of the latents, set where the file is written


def chunk_path(folder: Path, number: int) -> Path:
    return folder / "chunks" / f"{number // FILES_A_FOLDER:05d}" / f"{number:08d}.chunk"


def write_chunk(path: Path, header: ChunkHeader, latents: np.ndarray) -> None:
    """Write a chunk; `latents` (frames, channels) float16 of all samples, one after another."""
    latents = np.ascontiguousarray(latents, dtype="<f2")
    header.latents_hash = xxhash.xxh3_64_hexdigest(latents)
    text = json.dumps(asdict(header)).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(_PREFIX.pack(_MAGIC, len(text), xxhash.xxh3_64_intdigest(text)))
        file.write(text)
        file.write(latents)


def read_header(path: Path) -> tuple[ChunkHeader, int]:
    """The header, and where the latents begin in the file, in bytes."""
    with open(path, "rb") as file:
        prefix = file.read(_PREFIX.size)
        magic, size, digest = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (b"", 0, 0)
        text = file.read(size) if magic == _MAGIC else b""
    if len(text) != size or not text or xxhash.xxh3_64_intdigest(text) != digest:
        raise InputError(f"{path}: is damaged; remove it and start again, it will be made anew")
    values = json.loads(text)
    values["samples"] = [EncodedSample(**sample) for sample in values["samples"]]
    return ChunkHeader(**values), _PREFIX.size + size


def read_digest(path: Path) -> bytes:
    """What differs between any two chunks; `read_header` tells whether the file is whole."""
    with open(path, "rb") as file:
        return file.read(_PREFIX.size)


def read_frames(path: Path, data_offset: int, start: int, frames: int, channels: int) -> np.ndarray:
    """Latents (frames, channels) float16 from frame `start` of a chunk file."""
    out = np.empty((frames, channels), dtype="<f2")
    with open(path, "rb") as file:
        count = os.preadv(
            file.fileno(),
            [memoryview(out).cast("B")] if frames else [],
            data_offset + start * channels * 2,
        )
    if count != out.nbytes:
        raise InputError(f"{path}: is cut short; remove it and start again, it will be made anew")
    return out
