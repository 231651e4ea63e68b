"""What `from_pretrained` takes; that it speaks is in export/test_folders_travel.py."""

import pytest

from tests.helpers.sentences import refused
from titan_tts import from_pretrained


@pytest.mark.parametrize(
    "options, words",
    [
        ({"banana": 1}, ["no option 'banana'", "sampling_steps"]),
        ({"seed": 1}, ["no option 'seed'"]),
        ({"dtype": "bf16"}, ["dtype = 'bf16'", "auto, float32, bfloat16"]),
        ({"compile": True}, ["compile = True", "off, default, reduce-overhead"]),
    ],
)
def test_options_that_it_does_not_have(options, words):
    refused(lambda: from_pretrained("run", **options), *words)
