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
