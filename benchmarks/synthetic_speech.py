"""Archives with the lengths of real speech and random latents, for the benchmarks of the data path."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard

FRAMES_PER_SECOND = 25
CHANNELS = 128
LONGEST_SECONDS = 30.0
LONGEST_REFERENCE_FRAMES = 384
CHARACTERS_PER_SECOND = 14
SAMPLES_A_SHARD = 1000
MEAN_SECONDS = 9.0
# Standard deviation of the logarithm of an utterance's length.
SIGMA = 0.5
# Latents are cut out of this many random frames; drawing each anew would take longer than the rest.
_POOL_FRAMES = 1 << 16
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def lognormal_frames(generator: np.random.Generator, n: int) -> np.ndarray:
    """(n,) int64 latent frames of utterances of 1 to 30 s, log-normal; draws outside the range are drawn again, as a
    run leaves out what is too long."""
    mu = np.log(MEAN_SECONDS) - SIGMA**2 / 2
    seconds = np.empty(0)
    while len(seconds) < n:
        draws = generator.lognormal(mu, SIGMA, n)
        seconds = np.concatenate([seconds, draws[(draws >= 1) & (draws <= LONGEST_SECONDS)]])
    return np.ceil(seconds[:n] * FRAMES_PER_SECOND).astype(np.int64)


def reference_frames(generator: np.random.Generator, n: int) -> np.ndarray:
    """(n,) int64 latent frames of references, 3 to 15.36 s, all lengths alike."""
    return generator.integers(3 * FRAMES_PER_SECOND, LONGEST_REFERENCE_FRAMES + 1, n)


def random_text(generator: np.random.Generator, characters: int) -> str:
    """Words of 2 to 9 letters, some letters more common than others."""
    words, left = [], characters
    while left > 0:
        length = min(left, int(generator.integers(2, 10)))
        picks = (len(_LETTERS) * generator.random(length) ** 2).astype(int)
        words.append("".join(_LETTERS[pick] for pick in picks))
        left -= length + 1
    return " ".join(words)


def random_samples(frames: np.ndarray, seed: int) -> Iterator[Triplet]:
    """Triplets of these lengths; keys ``utt0000000`` and on."""
    generator = np.random.default_rng(seed)
    pool = (0.8 * generator.standard_normal((_POOL_FRAMES, CHANNELS), np.float32)).astype(
        np.float16
    )
    references = reference_frames(generator, len(frames))
    for number, (length, reference_length) in enumerate(zip(frames.tolist(), references.tolist())):
        starts = generator.integers(0, _POOL_FRAMES - 1024, 2)
        seconds = length / FRAMES_PER_SECOND
        yield Triplet(
            key=f"utt{number:07d}",
            latents=pool[starts[0] : starts[0] + length],
            reference=pool[starts[1] : starts[1] + reference_length],
            metadata={
                "text": random_text(generator, round(seconds * CHARACTERS_PER_SECOND)),
                "target_duration": seconds,
                "speaker": f"speaker{number % 64:02d}",
                "language": "en",
                "quality": ("studio", "clean", "noisy")[number % 3],
            },
        )


def write_archives(folder: Path, n: int, seed: int) -> list[str]:
    """Write ``n`` triplets in shards of 1000 tars to ``folder``; returns the tars' paths."""
    frames = lognormal_frames(np.random.default_rng(seed), n)
    samples = random_samples(frames, seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard, first in enumerate(range(0, n, SAMPLES_A_SHARD)):
        paths.append(str(folder / f"shard-{shard:06d}.tar"))
        count = min(SAMPLES_A_SHARD, n - first)
        write_shard(paths[-1], (next(samples) for _ in range(count)))
    return paths
