"""Which utterances a reference is made of."""

from dataclasses import dataclass

import numpy as np
import pytest

from titan_tts.prepare.pack_shards import Encoded, _drawn
from titan_tts.prepare.settings import Options
from torchtitan.models.dit_tts.data.references import DrawnReferences


@dataclass
class Chunks:
    """Samples that differ; their latents tell which one they are of, and which frame."""

    frames: np.ndarray

    def key(self, sample: int) -> str:
        return f"k{sample}"

    def load(self, sample: int):
        numbers = np.arange(self.frames[sample], dtype=np.float32)[:, None]
        self.latents = np.concatenate([numbers, np.full_like(numbers, sample)], axis=1)
        return self


def encoded(speakers, is_training, frames) -> Encoded:
    speakers, is_training = np.asarray(speakers), np.asarray(is_training)
    every, chunks = np.arange(len(speakers)), Chunks(np.asarray(frames))
    columns = speakers, chunks.frames, every.astype(np.uint64)
    of_split = {side: DrawnReferences(every[is_training == side], *columns) for side in (0, 1)}
    return Encoded(chunks, is_training, of_split, DrawnReferences(every, *columns))


def drawn(given: Encoded, sample: int, **settings: int) -> tuple[int, int, int] | None:
    """(sample, start, frames) of a reference."""
    options = Options("", "", **{"seed": 0, "max_reference_frames": 384} | settings)
    latents = np.array(given.chunks.load(sample).latents)
    if (found := _drawn(options, given, sample, latents)) is None:
        return None
    key, frames = found
    assert key == f"k{frames[0, 1]:.0f}" and (frames[:, 1] == frames[0, 1]).all()
    assert (np.diff(frames[:, 0]) == 1).all()
    return int(frames[0, 1]), int(frames[0, 0]), len(frames)


@pytest.mark.parametrize("longest", [5, 384])
def test_they_are_parts_of_other_utterances_and_differ_by_sample_and_seed(longest):
    """40 utterances of 3 to 42 frames; a single one has no reference, and with --references 0 none has one."""
    given = encoded([0] * 40 + [1], [True] * 41, [*range(3, 43), 9])
    found = [drawn(given, n, max_reference_frames=longest) for n in range(41)]
    assert found == [drawn(given, n, max_reference_frames=longest) for n in range(41)]
    assert found.pop() is None and drawn(given, 0, references=0) is None
    for sample, (other, start, frames) in enumerate(found):
        assert other != sample and frames == min(longest, 3 + other)
        assert 0 <= start <= 3 + other - frames
    assert len({other for other, *_ in found}) > 15
    assert len({start for _, start, _ in found}) > 10 or longest > 5
    seeds = [drawn(given, n, max_reference_frames=longest, seed=1) for n in range(40)]
    assert sum(a[0] != b[0] for a, b in zip(found, seeds)) > 30


def test_held_out_samples_have_held_out_references_else_training_ones():
    generator, seen = np.random.default_rng(0), set()
    for _ in range(60):
        n = int(generator.integers(1, 30))
        speaker, train = generator.integers(0, 5, n).astype(np.int32), generator.random(n) < 0.6
        given = encoded(speaker, train, generator.integers(1, 40, n))
        for sample in range(n):
            allowed = (speaker == speaker[sample]) & (np.arange(n) != sample)
            own_split = allowed & (train == train[sample])
            fallback = not own_split.any() and not train[sample]
            allowed &= train if fallback else own_split
            found = drawn(given, sample, max_reference_frames=int(generator.integers(1, 60)))
            assert allowed[found[0]] if found else not allowed.any()
            seen.add((found is not None, fallback))
    assert seen == {(True, False), (True, True), (False, False), (False, True)}


def test_what_overlaps_or_never_changes_is_drawn_no_more(monkeypatch):
    given, same = encoded([0, 0, 0, 1, 1], [True] * 5, [30] * 5), Chunks.load

    def load(chunks, sample):
        """1 overlaps 0, and 4 is silence."""
        found = same(chunks, 0 if sample == 1 else sample)
        found.latents[:] = found.latents if sample != 4 else 7
        return found

    monkeypatch.setattr(Chunks, "load", load)
    assert {drawn(given, 0, seed=seed)[0] for seed in range(20)} == {2}
    assert drawn(given, 3) is None
