"""Texts that say the same have no errors, whatever their writing and errors are counted by hand."""

import itertools

import pytest

from torchtitan.models.dit_tts.speech.scoring.word_errors import Errors, count_errors, normalizer

DIGITS = "zero one two three four five six seven eight nine".split()


@pytest.mark.parametrize(
    "text, heard, language",
    [
        ("Eight six.", "eight six", ""),
        ("Eight six.", "8, 6.", ""),
        ("Eight six.", "86", "en"),
        ("one six", "1-6", "en"),
        ("Twenty three sheep", "23 sheep", "english"),
        ("Mr. Smith won't pay $5!", "mister smith will not pay five dollars", "en-GB"),
        ("It's 5 %.", "it is five percent", ""),
        ("Wait... what?", "wait, what", ""),
        ("Oh, hello...", "oh hello", ""),
        ("She sold fifty bonds for nine pounds", "She sold 50 bonds for £9.", "en"),
        ("in nineteen ninety nine", "in 1999", ""),
        ("Two plus seven is less than a thousand", "2+7 is less than 1,000.", ""),
        ("A hundred men & fifty cents at minus five degrees", "100 men and 50¢ at -5°", ""),
        ("Bring (quietly) the [red] one", "bring quietly the red one", ""),
        ("Füße, Straße", "füße straße", "de-DE"),
        ("你好，世界。", "你好世界", "zh"),
        ("مَرْحَبًا بِكَ", "مرحبا بك", "ar"),
        ("हिन्दी में।", "हिन्दी में", "hi"),
    ],
)
def test_the_writing_does_not_count(text, heard, language):
    errors = count_errors(text, heard, language)
    assert errors.word_errors == errors.character_errors == 0 and errors.words > 1


@pytest.mark.parametrize(
    "text, heard, language, expected",
    [
        ("eight six two", "eight two", "", Errors(1, 3, 2, 5)),
        ("eight six", "eight five", "", Errors(1, 2, 1, 3)),  # not one word 86 for another
        ("one", "one six", "", Errors(1, 1, 2, 1)),
        ("the red one", "the bed", "", Errors(2, 3, 3, 9)),
        ("", "ah yes", "", Errors(2, 0, 6, 0)),
        ("...", "", "", Errors(0, 0, 0, 0)),
        ("a cat", "...", "", Errors(2, 2, 5, 5)),
        ("你好世界", "你号世界", "", Errors(1, 4, 1, 4)),
        ("ภาษาไทย", "ภาษาไท", "th", Errors(1, 7, 1, 7)),
        ("हिन्दी में", "हनद म", "hi", Errors(2, 2, 5, 10)),  # its vowels count
        ("thé", "the", "fr", Errors(1, 1, 1, 3)),
    ],
)
def test_errors(text, heard, language, expected):
    assert count_errors(text, heard, language) == expected


def test_every_digit_is_a_word():
    """The corpus's figures count spoken digits, however the normalizer would join them."""
    normalize = normalizer()
    for digits in itertools.product(range(10), repeat=2):
        said = " ".join(DIGITS[digit] for digit in digits)
        assert normalize(said).split() == [str(digit) for digit in digits]


def test_spelling_of_a_checkpoint():
    spelling = {"colour": "color"}
    for language, given, errors in (("", None, 1), ("en", spelling, 0), ("de", spelling, 1)):
        assert count_errors("The Colour", "the color", language, given).word_errors == errors
