"""Forced alignment: boundaries that are known, the best of all paths, and how long a character is expected to be."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Fetched
from torchtitan.models.dit_tts.text.aligner import (
    ALIGNER_FILE,
    _best_path,
    _spread,
    choose_recordings,
    fit_aligner,
    fit_lengths,
    load_aligner,
)

LETTERS, CHANNELS = "abcdefgh ", 12
_sounds = 3 * np.random.default_rng(1).standard_normal((len(LETTERS) + 1, CHANNELS))


def spoken(number: int) -> tuple[str, np.ndarray, np.ndarray]:
    """A text, its latents by a speaker of own offset and gain, and the frames of each character between two
    silences. An h is silent, c and e take long."""
    draw = np.random.default_rng(number)
    text = "".join(draw.choice(list(LETTERS), draw.integers(8, 30)))
    longest = {"h": (0, 1), "c": (4, 7), "e": (4, 7)}
    frames = [draw.integers(*longest.get(c, (1, 4))) for c in text]
    frames = np.array([draw.integers(1, 6), *frames, draw.integers(1, 6)])
    states = np.repeat([0, *(1 + LETTERS.index(c) for c in text), 0], frames)
    latents = _sounds[states] + draw.standard_normal((len(states), CHANNELS))
    offset, gain = np.random.default_rng(number % 3).uniform(0.5, 2, (2, CHANNELS))
    return text.upper() if number % 2 else text, offset + gain * latents, frames


@pytest.fixture(scope="module")
def aligner():
    return fit_aligner([spoken(number)[:2] for number in range(150)])


def test_boundaries_of_recordings_that_were_not_trained_on(aligner):
    errors, expected_errors, even = [], [], []
    for number in range(1000, 1040):
        text, latents, frames = spoken(number)
        found = aligner.frames(text, latents)
        assert len(found) == len(text) + 2 and found.sum() == len(latents)
        ends = frames.cumsum()
        errors += np.abs(found.cumsum() - ends).tolist()
        expected = aligner.expected_frames(text)
        expected_errors.append(np.abs(expected - frames)[1:-1].mean())
        even.append(np.abs(frames[1:-1] - frames[1:-1].mean()).mean())
    assert np.mean(np.array(errors) <= 1) > 0.95
    # Lengths were drawn from three values each, which leaves less than a frame.
    assert np.mean(expected_errors) < 0.8 < 1.2 < np.mean(even)
    assert aligner.expected_frames("h")[1] < 0.3 and aligner.expected_frames("e")[1] > 4
    assert np.array_equal(aligner.states("xA"), [0, 1, 2 + aligner.symbols.index("a"), 0])


def test_the_best_of_all_paths():
    """Steps of up to 3 states; each that is left out costs 2; the first and the last state may be left out."""
    draw = np.random.default_rng(2)
    for frames, states in ((1, 3), (4, 3), (3, 6), (5, 5), (6, 4)):
        emissions = draw.standard_normal((frames, states)).astype(np.float32)
        best, found = -np.inf, None
        for steps in itertools.product(range(4), repeat=frames - 1):
            for first in (0, 1):
                path = first + np.cumsum([0, *steps])
                if path[-1] not in (states - 1, states - 2):
                    continue
                score = emissions[np.arange(frames), path].sum() - 2 * sum(
                    max(0, s - 1) for s in steps
                )
                if score > best:
                    best, found = score, path
        expected = _spread(frames, states) if found is None else found
        assert np.array_equal(_best_path(emissions), expected), (frames, states)


def test_a_text_too_long_for_its_recording_is_spread_evenly(aligner):
    frames = aligner.frames("abcd" * 10, np.zeros((4, CHANNELS)))
    assert np.array_equal(np.flatnonzero(frames), [5, 15, 26, 36]) and frames.max() == 1


def test_a_stored_aligner_is_the_same(aligner, tmp_path):
    aligner.save(tmp_path)
    stored, (text, latents, _) = load_aligner(tmp_path), spoken(7)
    assert stored.symbols == aligner.symbols and stored.means.dtype == np.float32
    assert np.array_equal(stored.frames(text, latents), aligner.frames(text, latents))
    assert np.array_equal(stored.expected_frames(text), aligner.expected_frames(text))
    path = tmp_path / ALIGNER_FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    refused(lambda: load_aligner(tmp_path), str(path))
    path.unlink()
    refused(lambda: load_aligner(tmp_path), str(path))


def test_recordings_are_chosen_evenly_within_the_limits():
    """Five of 101 that fit, as 25 frames are affordable: the others are too long or without text, one is corrupt."""
    frames, chars = np.full(103, 6), np.full(103, 3)
    frames[40], chars[41] = 99, 0

    def load(sample, fetched):
        assert fetched == f"bytes of {sample}"
        if sample == 0:
            raise CorruptSampleError("corrupt")
        return SimpleNamespace(metadata={"text": str(sample)}, latents=np.zeros((6, 4)))

    dataset = SimpleNamespace(frames=frames, text_chars=chars, load=load)
    dataset.fetch = lambda samples: Fetched({each: f"bytes of {each}" for each in samples}, {})
    chosen = choose_recordings(dataset, 98, total_frames=25)
    assert [text for text, _ in chosen] == ["25", "52", "77", "102"]


def test_lengths_by_the_characters_around():
    """Means of what narrower contexts leave, as if eight examples more had said nothing; the mean of all is whole."""
    states, frames = [np.array([2, 3]), np.array([2, 4])], [np.array([4, 1]), np.array([6, 1])]
    lengths = fit_lengths(states, frames)
    # 3 on average; state 2 takes 1 and 3 more, before a 4 the 3.
    known = 3 + (1 + 3) / 10
    before_four = known + (3 - 4 / 10) / 9
    for text, expected in (([9, 2, 9], known), ([9, 2, 4], before_four), ([1_114_113, 9, 8], 3)):
        assert lengths.expected(np.array(text))[1] == pytest.approx(expected)
    assert known < lengths.expected(np.array([2, 3]))[0] < lengths.expected(np.array([2, 4]))[0] < 6
