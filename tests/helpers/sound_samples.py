"""Small shards without any fault that the doctor knows, and the means to make one."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.helpers.tars import npy, write_tar
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard

CHANNELS = 8
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


def sound_samples(count: int = 24, seed: int = 0) -> list[Triplet]:
    """Triplets of three speakers: 14 letters a second, 2 to 5 seconds."""
    generator = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        frames = int(generator.integers(50, 125))
        seconds = frames / 25
        arrays = speech(generator, frames), speech(generator, 30)
        metadata = {"text": "".join(generator.choice(LETTERS, size=round(14 * seconds)))}
        metadata |= {"speaker": f"s{number % 3}", "language": "en", "target_duration": seconds}
        metadata["reference_key"] = f"utt{(number + 3) % count:03d}"
        samples.append(Triplet(f"utt{number:03d}", *arrays, metadata))
    return samples


def speech(generator: np.random.Generator, frames: int, std: float = 0.8) -> np.ndarray:
    """Latents (frames, CHANNELS) float16."""
    return (std * generator.standard_normal((frames, CHANNELS))).astype(np.float16)


def changed(sample: Triplet, **changes) -> Triplet:
    """A copy with other arrays, key or metadata; metadata keys set to None are left out."""
    metadata = {**sample.metadata, **changes.pop("metadata", {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return dataclasses.replace(sample, metadata=metadata, **changes)


def write_shards(folder: Path, samples: Sequence[Triplet], shards: int = 2) -> list[Path]:
    """Equal parts of the samples, one after another, as shard-000000.tar ..."""
    folder.mkdir(parents=True, exist_ok=True)
    per_shard = -(-len(samples) // shards)
    paths = [folder / f"shard-{number:06d}.tar" for number in range(shards)]
    for number, path in enumerate(paths):
        write_shard(path, samples[number * per_shard : (number + 1) * per_shard])
    return paths


def write_raw(path: Path, members: dict[str, bytes]) -> None:
    """A tar of members as they are, with what the shard writer would refuse."""
    write_tar(path, members.items())


def raw_members(sample: Triplet) -> dict[str, bytes]:
    """The three members of a sample, without hashes."""
    return {
        f"{sample.key}.npy": npy(sample.latents),
        f"{sample.key}.ref.npy": npy(sample.reference),
        f"{sample.key}.json": json.dumps(sample.metadata).encode(),
    }


def flip_byte_unnoticed(path: Path, offset: int) -> None:
    """Change one byte and keep the file's time, as a failing disk does."""
    stat = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x55]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
