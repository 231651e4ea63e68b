"""Small synthetic datasets for tests: random latents with the text of spoken digits."""

import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard

CAPTIONS = ("calm", "très vieille", "wild", "old", "whispering")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def lognormal_frames(generator: np.random.Generator) -> int:
    """A skewed length, 8 to 200 frames, mostly near 40: distributed as real speech is, but short."""
    return int(np.clip(generator.lognormal(np.log(40), 0.6), 8, 200))


def make_samples(
    n: int,
    seed: int = 0,
    *,
    channels: int = 128,
    frames: Callable[[np.random.Generator], int] = lognormal_frames,
    max_reference_frames: int = 64,
) -> list[Triplet]:
    """`n` triplets that `seed` determines; about one word for ten frames."""
    generator = np.random.default_rng(seed)

    def array(rows: int) -> np.ndarray:
        return (0.8 * generator.standard_normal((rows, channels))).astype(np.float16)

    samples = []
    for number in range(n):
        length = frames(generator)
        reference_length = int(generator.integers(4, max_reference_frames + 1))
        words = generator.choice(DIGITS, size=max(1, length // 10))
        metadata = {
            "text": " ".join(words),
            "target_duration": length / 25.0,
            "speaker": f"s{number % 4}",
            "language": ("en", "de", "en")[number % 3],
        }
        if number % 3:  # some have none
            metadata["caption"] = f"a {CAPTIONS[number % 5]} voice"
        samples.append(
            Triplet(f"utt{number:06d}", array(length), array(reference_length), metadata)
        )
    return samples


def make_shards(
    folder: str | Path,
    n: int,
    seed: int = 0,
    *,
    shards: int = 2,
    channels: int = 128,
    frames: Callable[[np.random.Generator], int] = lognormal_frames,
) -> Path:
    """Write `n` samples over `shards` tars of `folder` (made if absent); return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    samples = make_samples(n, seed, channels=channels, frames=frames)
    for shard in range(shards):
        write_shard(folder / f"{shard:06d}.tar", samples[shard::shards])
    return folder


def flip_bits(tar_path: str | Path, member_numbers: Iterable[int]) -> None:
    """Flip a bit in the data of some members, which leaves no trace in the file's size or time."""
    with tarfile.open(tar_path) as tar:
        members = tar.getmembers()
    before = os.stat(tar_path)
    with open(tar_path, "r+b") as file:
        for number in member_numbers:
            position = members[number].offset_data + members[number].size - 1
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1]))
    os.utime(tar_path, ns=(before.st_atime_ns, before.st_mtime_ns))
