"""Which utterances a reference is made of."""

import numpy as np
import pytest

from titan_tts.prepare.references import Span, SpeakerTable, choose_references

ANN_HELD, BOB, CAT = (20, 44), 21, (22, 43, 45)


def make_table() -> SpeakerTable:
    """ann (0): 40 training utterances of 3 to 42 frames and two held out; bob (1): one; cat (2):
    three of 4."""
    samples = [(0, True, 3 + n) for n in range(40)]
    samples[20:20] = [(0, False, 9), (1, True, 11), (2, True, 4)]
    samples += [(2, True, 4), (0, False, 8), (2, True, 4)]
    return SpeakerTable(*map(np.array, zip(*samples, strict=True)), np.arange(len(samples)))


def choose(table: SpeakerTable, sample: int, **settings: int) -> list[Span]:
    defaults = {"seed": 0, "count": 1, "max_frames": 384}
    return choose_references(table, sample, f"k{sample}", **defaults | settings)


@pytest.mark.parametrize("count, longest", [(1, 5), (3, 384), (3, 25)])
def test_references_are_other_utterances_of_the_speaker(count, longest):
    table = make_table()
    for sample in range(len(table.frames)):
        spans = choose(table, sample, count=count, max_frames=longest)
        assert spans == choose(table, sample, count=count, max_frames=longest)
        if sample == BOB:
            assert spans == []
            continue
        assert len({span.sample for span in spans}) == len(spans) <= count
        length = sum(span.frames for span in spans)
        assert 1 <= length <= longest
        for number, span in enumerate(spans):
            frames = table.frames[span.sample]
            assert span.sample != sample and table.speaker[span.sample] == table.speaker[sample]
            assert table.train[span.sample] == table.train[sample] and span.frames >= 1
            assert 0 <= span.start and span.start + span.frames <= frames
            # One stretch over the utterances: cut before the first and behind the last alone.
            assert span.start == 0 or number == 0
            assert span.start + span.frames == frames or number == len(spans) - 1
        if longest == 384:
            assert all(span.frames == table.frames[span.sample] for span in spans)
            others = 1 if sample in ANN_HELD else 2 if sample in CAT else 39
            assert len(spans) == min(count, others)


def test_references_differ_by_sample_and_seed():
    table = make_table()
    samples = np.flatnonzero((table.speaker == 0) & table.train)
    first, second = (
        [choose(table, sample, seed=seed, max_frames=5)[0] for sample in samples] for seed in (0, 1)
    )
    assert len({span.sample for span in first}) > 15  # of 40 draws out of 39
    assert len({span.start for span in first}) > 10
    assert sum(a.sample != b.sample for a, b in zip(first, second)) > 30


def random_table(generator: np.random.Generator) -> tuple[SpeakerTable, np.ndarray]:
    """Up to 30 samples of few speakers, some of them copies of each other; with their contents."""
    n = int(generator.integers(1, 30))
    content = generator.integers(0, 2**64, 12, np.uint64)[generator.integers(0, 12, n)]
    speaker, train = generator.integers(0, 5, n).astype(np.int32), generator.random(n) < 0.6
    return SpeakerTable(speaker, train, generator.integers(1, 40, n), content), content


def test_no_reference_is_of_its_target_whatever_the_corpus():
    """Held-out samples have held-out references, else training ones; nobody has a copy of himself."""
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        table, content = random_table(generator)
        count, longest = generator.integers(1, 4), generator.integers(1, 60)
        for sample in range(len(content)):
            allowed = (table.speaker == table.speaker[sample]) & (content != content[sample])
            own_split = allowed & (table.train == table.train[sample])
            fallback = not own_split.any() and not table.train[sample]
            allowed &= table.train if fallback else own_split
            spans = choose(table, sample, count=count, max_frames=longest)
            assert all(allowed[span.sample] for span in spans)
            assert bool(spans) == bool(allowed.any())
            seen.add((bool(spans), fallback))
    assert seen == {(True, False), (True, True), (False, False), (False, True)}
