"""A small speech recognizer over a known vocabulary, and word errors.

PocketSphinx (PyPI, brings its English model, runs offline) with a grammar that loops over the words
of a vocabulary: any word may follow any other, any number of times. On the real recordings of the
embedded corpus it errs in under 1 % of the words; an open vocabulary would make it useless.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan.models.dit_tts.audio import resample
from torchtitan.models.dit_tts.errors import InputError

MODEL_SAMPLE_RATE = 16_000  # Hz, of PocketSphinx's English model
# The model was trained on speech with pauses around it: without them it hears words in the edges
# (measured on the corpus: 5.2 % of the words wrong instead of 0.6 %).
EDGE_SILENCE_SECONDS = 0.3
# Likelihood factor per word; with the library's own 0.65 it hears short words in the breath at the
# end (1.2 % wrong instead of 0.6 %).
WORD_INSERTION_PENALTY = 1e-3


class KeywordRecognizer:
    """Recognizes the words of a vocabulary. Each call is independent of the calls before."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        from pocketsphinx import Decoder

        # No language model: the grammar takes its place. The log would go to standard error.
        self.decoder = Decoder(
            samprate=MODEL_SAMPLE_RATE, lm=None, loglevel="FATAL", wip=WORD_INSERTION_PENALTY
        )
        unknown = [word for word in vocabulary if self.decoder.lookup_word(word) is None]
        if unknown:
            raise InputError(
                f"vocabulary word '{unknown[0]}' is not in PocketSphinx's English dictionary; take words "
                "in lower case that it knows"
            )
        grammar = f"#JSGF V1.0; grammar words; public <text> = ({' | '.join(vocabulary)})+;"
        self.decoder.add_jsgf_string("words", grammar)
        self.decoder.activate_search("words")
        # Its running estimate of the channel, put back before every call.
        self.channel_mean = self.decoder.get_cmn()

    def transcribe(self, waveform: Tensor, sample_rate: int) -> list[str]:
        """Words heard in a waveform (samples,) float in [-1, 1]; [] where it hears none.

        Args:
            sample_rate: Hz, of the waveform; others than the model's 16 kHz are resampled.
        """
        edge = int(EDGE_SILENCE_SECONDS * MODEL_SAMPLE_RATE)
        samples = waveform.detach().to("cpu", torch.float32)
        samples = torch.from_numpy(resample(samples.numpy(), sample_rate, MODEL_SAMPLE_RATE))
        samples = torch.nn.functional.pad(samples.clamp(-1.0, 1.0), (edge, edge))
        integers = (samples * 32767).round().to(torch.int16).numpy()
        self.decoder.set_cmn(self.channel_mean)
        self.decoder.start_utt()
        self.decoder.process_raw(integers.tobytes(), full_utt=True)
        self.decoder.end_utt()
        hypothesis = self.decoder.hyp()
        return hypothesis.hypstr.split() if hypothesis is not None else []


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """Levenshtein distance: substitutions, insertions and deletions from one to the other."""
    previous = list(range(len(hypothesis) + 1))
    for row, wanted in enumerate(reference, start=1):
        current = [row]
        for column, heard in enumerate(hypothesis, start=1):
            substituted = previous[column - 1] + (wanted != heard)
            current.append(min(substituted, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]
