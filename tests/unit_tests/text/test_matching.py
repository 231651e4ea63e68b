"""Texts that belong to other recordings, by the spread of their lengths: real recordings and made ones."""

import numpy as np
import pytest

from tests.helpers.speech_corpora import RATE, read_corpus
from torchtitan.models.dit_tts.text.matching import (
    LITTLE_EXPLAINED,
    MATCH,
    NOT_COMPARED,
    OF_OTHERS,
    judge_texts,
)


@pytest.fixture(scope="module")
def digits():
    """(JSON, frames) of 600 recordings of two voices."""
    found = list(
        read_corpus(wanted=lambda item: item.speaker in ("slt", "rms") and item.split == "train")
    )[::2]
    frames = np.array([-(-25 * len(one.samples) // RATE) for one in found])
    return [{"text": one.text, "language": "en"} for one in found], frames


@pytest.mark.parametrize("shuffled, verdict", [(False, MATCH), (True, OF_OTHERS)])
def test_spoken_digits_beside_the_texts_of_others(digits, shuffled, verdict):
    metadata, frames = digits
    order = np.random.default_rng(0).permutation(600) if shuffled else np.arange(600)
    # Beside another language, each is judged by itself.
    german = [{**metadata[number], "language": "de"} for number in order]
    both = judge_texts([*metadata, *german], np.tile(frames, 2))
    assert [(one.language, one.verdict) for one in both] == [("de", verdict), ("en", MATCH)]


def made(count, words, noise):
    """Texts of so many words of the letters a to i, each of a length of its own, and frames."""
    generator, texts, frames = np.random.default_rng(count), [], []
    for _ in range(count):
        letters = generator.integers(0, 9, 5 * int(generator.choice(words)))
        said = "".join("abcdefghi"[one] for one in letters)
        texts.append(" ".join(said[n : n + 5] for n in range(0, len(said), 5)))
        frames.append(10 + (1 + letters / 10).sum() + generator.uniform(0, noise))
    return [{"text": text} for text in texts], np.array(frames).round()


@pytest.mark.parametrize(
    "count, words, noise, verdict",
    [
        (120, range(3, 14), 0, MATCH),
        (300, range(9, 12), 0, MATCH),
        # Up to 3.6 seconds of silence beside 2 of speech.
        (300, range(3, 14), 90, LITTLE_EXPLAINED),
        (15, range(3, 14), 0, NOT_COMPARED),
        (120, [2], 0, NOT_COMPARED),
    ],
)
def test_limits_follow_from_what_right_texts_explain(count, words, noise, verdict):
    texts, frames = made(count, words, noise)
    [match] = judge_texts(texts, frames)
    assert match.verdict == verdict and match.count == count
    if verdict == MATCH:
        assert judge_texts(texts[9:] + texts[:9], frames)[0].verdict == OF_OTHERS
        texts[0]["text"] *= 300  # a book's, beside one sentence
        assert judge_texts(texts, frames)[0].verdict == MATCH
