"""Shards whose latents depend on text and speaker, so that a tiny model can learn what they say."""

from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard

CHANNELS, FRAMES_PER_LETTER = 8, 4
_LETTERS = "abcdefgh"
_SPEAKERS = 4


def make_speaking_shards(
    folder: Path, n: int, seed: int, *, letters: int = 2, noise: float = 0.5, shuffled: bool = False
) -> Path:
    """Writes `n` utterances to two shards: each letter of the text is the same few frames in every
    utterance, to which the speaker adds one vector, and noise of its own comes on top. `shuffled` gives
    each the text of another."""
    fixed = np.random.default_rng(7)
    sounds = dict(
        zip(_LETTERS, fixed.standard_normal((len(_LETTERS), FRAMES_PER_LETTER, CHANNELS)))
    )
    voices = 0.7 * fixed.standard_normal((_SPEAKERS, CHANNELS))
    generator = np.random.default_rng(seed)

    def noisy(clean: np.ndarray) -> np.ndarray:
        return (clean + noise * generator.standard_normal(clean.shape)).astype(np.float16)

    texts = ["".join(generator.choice(list(_LETTERS), letters)) for _ in range(n)]
    labels = np.roll(texts, 1).tolist() if shuffled else texts
    samples = []
    for number, text in enumerate(texts):
        speaker = int(generator.integers(_SPEAKERS))
        latents = noisy(np.concatenate([sounds[letter] for letter in text]) + voices[speaker])
        reference = noisy(np.repeat(voices[None, speaker], 8, axis=0))
        metadata = {"text": labels[number], "speaker": f"s{speaker}"}
        samples.append(Triplet(f"utt{number:06d}", latents, reference, metadata))
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        write_shard(folder / f"{shard:06d}.tar", samples[shard::2])
    return folder
