"""Which utterances a reference is made of."""

import numpy as np
import pytest

from torchtitan.models.dit_tts.prepare.references import SpeakerTable, choose_references


def make_table() -> SpeakerTable:
    """ann (0): 40 training utterances of 3 to 42 frames and two held out; bob (1): one; cat (2):
    three of 4."""
    samples = [(0, True, 3 + n) for n in range(40)]
    samples[20:20] = [(0, False, 9), (1, True, 11), (2, True, 4)]
    samples += [(2, True, 4), (0, False, 8), (2, True, 4)]
    return SpeakerTable(*map(np.array, zip(*samples, strict=True)))


@pytest.mark.parametrize("count, longest", [(1, 384), (1, 5), (3, 384), (3, 25)])
def test_references_are_other_training_utterances_of_the_speaker(count, longest):
    table = make_table()
    for sample in range(len(table.frames)):

        def choose():
            return choose_references(
                table, sample, f"k{sample}", seed=0, count=count, max_frames=longest
            )

        spans = choose()
        assert spans == choose()
        assert len({span.sample for span in spans}) == len(spans) <= count
        length = sum(span.frames for span in spans)
        assert length <= longest
        if sample == 21:  # bob has no other: at most half of it
            assert [span.sample for span in spans] == [sample] and length == min(5, longest)
            assert spans[0].start + length <= 11
            continue
        for number, span in enumerate(spans):
            frames = table.frames[span.sample]
            assert span.sample != sample and table.speaker[span.sample] == table.speaker[sample]
            assert table.train[span.sample] and span.frames >= 1
            assert 0 <= span.start and span.start + span.frames <= frames
            # One stretch over the utterances: cut before the first and behind the last alone.
            assert span.start == 0 or number == 0
            assert span.start + span.frames == frames or number == len(spans) - 1
        if longest == 384:
            assert all(span.frames == table.frames[span.sample] for span in spans)
            assert len(spans) == min(count, 39 if table.speaker[sample] == 0 else 2)
        elif count == 1:
            assert length == min(longest, table.frames[spans[0].sample])
    assert np.flatnonzero(table.without_others()).tolist() == [21]


def test_references_differ_by_sample_and_seed():
    table = make_table()

    def drawn(seed: int) -> list:
        return [
            choose_references(table, sample, f"k{sample}", seed=seed, count=1, max_frames=5)[0]
            for sample in np.flatnonzero(table.speaker == 0)
        ]

    first, second = drawn(0), drawn(1)
    assert len({span.sample for span in first}) > 15  # of 42 draws out of 40
    assert len({span.start for span in first}) > 10
    assert sum(a.sample != b.sample for a, b in zip(first, second)) > 30
