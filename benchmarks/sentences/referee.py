"""The referee of the sentences: PocketSphinx with a trigram of other sentences of the grammar, and its phone loop.

As recognizers of `titan-tts evaluate` and of samples, from the project's folder: --recognizer
benchmarks.sentences.referee:words, or :phones, whose "words" are phones, so that WER is the phone error rate.
"""

import itertools
import re
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from pocketsphinx import Decoder, get_model_path

from benchmarks.sentences.grammar import forms, lexicon, sentences, spelled, words_of
from benchmarks.sentences.trigram import write_trigram
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.speech.scoring.interface import Sound

SEED = 0
SENTENCES = 20_000
"""of the grammar's set "other", from which the trigram is counted"""

RATE = 16_000
_EDGE_SECONDS = 0.3  # the acoustic model was trained on speech with pauses around it
_SILENT_BELOW = 1e-4
_SILENCES = {"SIL", "+SPN+", "+NSN+"}


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
        self.known = {
            form.lower() for entries in lexicon().values() for e in entries for form in forms(e)
        }
        self.channel_mean = self.decoder.get_cmn()

    def check_texts(self, texts: Sequence[str], languages: Sequence[str] = ()) -> None:
        """Raises InputError for a text that no sentence of the grammar can be."""

    def transcribe(self, sound: Sound, language: str = "") -> str:
        self.decoder.set_cmn(self.channel_mean)
        hypothesis = _decode(self.decoder, sound)
        return re.sub(r"\(\d+\)", "", hypothesis)


def words(device: str) -> WordReferee:
    """The factory that --recognizer names."""
    return WordReferee()


def second(device: str) -> WordReferee:
    """The same with a trigram of 2,000 other sentences, which errs more, and elsewhere: one to compare with."""
    return WordReferee(SEED + 1, SENTENCES // 10)


class PhoneReferee:
    """Recognizes phones by a phone trigram of general English: no word list and no grammar helps it."""

    name = "phone loop (PocketSphinx)"

    def __init__(self) -> None:
        trigram = Path(get_model_path("en-us"), "en-us-phone.lm.bin")
        # Weights of PocketSphinx's own tutorial on phoneme recognition.
        self.decoder = Decoder(
            samprate=RATE,
            lm=None,
            allphone=str(trigram),
            lw=2.0,
            beam=1e-20,
            pbeam=1e-20,
            loglevel="FATAL",
        )
        self.channel_mean = self.decoder.get_cmn()

    def check_texts(self, texts: Sequence[str], languages: Sequence[str] = ()) -> None:
        """Raises InputError for a text with a word that the dictionary lacks."""
        unknown = {word for text in texts for word in spoken_words(text)} - pronunciations().keys()
        require(not unknown, f"the phone dictionary lacks {', '.join(sorted(unknown)[:5])}")

    def units(self, text: str) -> str:
        """The dictionary's phones of a text."""
        return _as_words(phone for word in spoken_words(text) for phone in pronunciations()[word])

    def transcribe(self, sound: Sound, language: str = "") -> str:
        self.decoder.set_cmn(self.channel_mean)
        heard = _decode(self.decoder, sound).split()
        return _as_words(phone for phone in heard if phone not in _SILENCES)


def _as_words(phones: Iterable[str]) -> str:
    """Phones such as UH and M so written that a normalizer of texts does not take them for hesitation."""
    return " ".join(f"ph{phone.lower()}" for phone in phones)


def phones(device: str) -> PhoneReferee:
    """The factory of the phone loop."""
    return PhoneReferee()


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


@cache
def pronunciations() -> dict[str, list[str]]:
    """Word -> its first pronunciation in PocketSphinx's English dictionary."""
    lines = Path(get_model_path("en-us"), "cmudict-en-us.dict").read_text().splitlines()
    entries = (line.split() for line in lines)
    return {word: phones for word, *phones in entries if "(" not in word}
