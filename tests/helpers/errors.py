"""What tests ask of mistakes of a user."""

import pytest

from torchtitan.models.dit_tts.errors import InputError


def refused(call, *words: str) -> None:
    """`call` raises an InputError of one line that has all of `words`."""
    with pytest.raises(InputError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence
