"""The referee of the sentences: PocketSphinx with a trigram of other sentences of the grammar.

As a recognizer of `titan-tts evaluate` and of samples, from the project's folder:
--recognizer benchmarks.sentences.referee:words
"""

import itertools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pocketsphinx import Decoder

from benchmarks.sentences.grammar import sentences, spelled, words_of
from benchmarks.sentences.trigram import write_trigram
from torchtitan.models.dit_tts.speech.scoring.interface import Sound

SEED = 0
SENTENCES = 20_000
"""of the grammar's set "other", from which the trigram is counted"""

RATE = 16_000
_EDGE_SECONDS = 0.3  # the acoustic model was trained on speech with pauses around it
_SILENT_BELOW = 1e-4


def spoken_words(text: str) -> list[str]:
    """A text's words in lower case, numbers spelled out."""
    return [
        part
        for word in words_of(text)
        for part in (spelled(int(word)).split() if word.isdigit() else [word])
    ]


class WordReferee:
    """Recognizes the words of the grammar in the order in which its sentences have them."""

    name = "trigram of the grammar (PocketSphinx)"

    def __init__(self, seed: int = SEED, count: int = SENTENCES) -> None:
        texts = itertools.islice(sentences(seed, "other"), count)
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "trigram.arpa")
            write_trigram(map(spoken_words, texts), model)
            self.decoder = Decoder(samprate=RATE, lm=str(model), loglevel="FATAL")
        self.channel_mean = self.decoder.get_cmn()

    def check_texts(self, texts: Sequence[str], languages: Sequence[str] = ()) -> None:
        """Accepts every text; words that the grammar lacks are heard as others."""

    def transcribe(self, sound: Sound, language: str = "") -> str:
        self.decoder.set_cmn(self.channel_mean)
        hypothesis = _decode(self.decoder, sound)
        return re.sub(r"\(\d+\)", "", hypothesis)


def words(device: str) -> WordReferee:
    """The factory that --recognizer names."""
    return WordReferee()


def _decode(decoder: Decoder, sound: Sound) -> str:
    heard = sound.samples(RATE)
    if np.abs(heard).max(initial=0.0) < _SILENT_BELOW:
        return ""
    samples = np.pad(heard, int(_EDGE_SECONDS * RATE))
    decoder.start_utt()
    decoder.process_raw((samples * 32767).round().astype(np.int16).tobytes(), full_utt=True)
    decoder.end_utt()
    hypothesis = decoder.hyp()
    return hypothesis.hypstr if hypothesis is not None else ""
