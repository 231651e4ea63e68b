"""The sentence of a user's mistake."""

import pytest

from torchtitan.models.dit_tts.errors import InputError


def sentence_of(function, *args) -> str:
    """The message of the InputError that the call raises: one line without a full stop."""
    with pytest.raises(InputError) as caught:
        function(*args)
    sentence = str(caught.value)
    assert "\n" not in sentence and not sentence.endswith(".")
    return sentence


def refused(call, *words: str) -> None:
    """The call raises an InputError that has all of `words`."""
    sentence = sentence_of(call)
    for word in words:
        assert word in sentence, sentence
