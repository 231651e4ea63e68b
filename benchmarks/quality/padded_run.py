"""Trains as the package does, and evaluates a model that was trained on padding by its own ends of speech.

    python -m benchmarks.quality.padded_run train|evaluate ...      (arguments of titan-tts)

With `[objective] loss_on_padding` every row of training has one length, and the model makes zero latents
behind the speech. So sampling makes rows of that length, and cuts each where its latents become silent,
instead of where the text's estimated length ends.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from titan_tts.speak import synthesizer
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Utterance
from torchtitan.models.dit_tts.speech.sampling.sampler import generate_latents

SILENT_RMS = 0.3
"""Frames below it are padding: latents of speech have an RMS near 1, padding is 0 with the model's error"""


def speech_end(latents: torch.Tensor) -> int:
    """Number of frames of latents (T, C) up to the last that is not silent, at least 1."""
    loud = (latents.square().mean(-1).sqrt() > SILENT_RMS).nonzero()
    return int(loud[-1]) + 1 if len(loud) else 1


def substitute() -> None:
    """Puts rows of one length, cut at the end of speech, in the place of rows of estimated lengths."""

    def frames(self: Synthesizer, utterances: Sequence[Utterance]) -> list[int]:
        return [self.run.config.data.max_frames] * len(utterances)

    def generate(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [row[: speech_end(row)] for row in generate_latents(*args, **kwargs)]

    Synthesizer.frames = frames  # type: ignore[method-assign]
    synthesizer.generate_latents = generate


if __name__ == "__main__":
    from titan_tts.cli import main

    substitute()
    sys.exit(main(sys.argv[1:]))
