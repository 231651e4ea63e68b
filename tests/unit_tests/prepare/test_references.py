"""Which utterances a reference is made of."""

import numpy as np
import pytest

from titan_tts.prepare.references import Span, SpeakerTable, choose_reference

ANN_HELD, BOB, CAT = (20, 44), 21, (22, 43, 45)


def make_table() -> SpeakerTable:
    """ann (0): 40 training utterances of 3 to 42 frames and two held out; bob (1): one; cat (2): three of 4."""
    samples = [(0, True, 3 + n) for n in range(40)]
    samples[20:20] = [(0, False, 9), (1, True, 11), (2, True, 4)]
    samples += [(2, True, 4), (0, False, 8), (2, True, 4)]
    return SpeakerTable(*map(np.array, zip(*samples, strict=True)))


def choose(table: SpeakerTable, sample: int, **settings: int) -> Span | None:
    defaults = {"seed": 0, "max_frames": 384}
    return choose_reference(table, sample, f"k{sample}", **defaults | settings)


@pytest.mark.parametrize("longest", [5, 384])
def test_references_are_other_utterances_of_the_speaker(longest):
    table = make_table()
    for sample in range(len(table.frames)):
        span = choose(table, sample, max_frames=longest)
        assert span == choose(table, sample, max_frames=longest)
        if sample == BOB:
            assert span is None
            continue
        frames = table.frames[span.sample]
        assert span.frames == min(longest, frames) and 0 <= span.start <= frames - span.frames
        # Each other utterance is given once.
        others = 1 if sample in ANN_HELD else 2 if sample in CAT else 39
        given = [choose(table, sample, attempt=n) for n in range(others)]
        assert len({each.sample for each in given} - {sample}) == others
        assert choose(table, sample, attempt=others) is None
    # They differ by sample and seed.
    samples = [*range(20), *range(23, 43)]  # ann's training ones
    first, second = (
        [choose(table, sample, seed=seed, max_frames=5) for sample in samples] for seed in (0, 1)
    )
    assert len({span.sample for span in first}) > 15  # of 40 draws out of 39
    assert len({span.start for span in first}) > 10
    assert sum(a.sample != b.sample for a, b in zip(first, second)) > 30


def test_no_reference_is_of_its_target_whatever_the_corpus():
    """Held-out samples have held-out references, else training ones."""
    generator, seen = np.random.default_rng(0), set()
    for _ in range(60):
        n = int(generator.integers(1, 30))
        speaker, train = generator.integers(0, 5, n).astype(np.int32), generator.random(n) < 0.6
        table = SpeakerTable(speaker, train, generator.integers(1, 40, n))
        for sample in range(n):
            allowed = (speaker == speaker[sample]) & (np.arange(n) != sample)
            own_split = allowed & (train == train[sample])
            fallback = not own_split.any() and not train[sample]
            allowed &= train if fallback else own_split
            span = choose(table, sample, max_frames=generator.integers(1, 60))
            assert allowed[span.sample] if span else not allowed.any()
            seen.add((span is not None, fallback))
    assert seen == {(True, False), (True, True), (False, False), (False, True)}
