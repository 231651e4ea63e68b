"""A small speech recognizer over a known vocabulary.

PocketSphinx (PyPI, brings its English model, runs offline) with a grammar that loops over the words
of a vocabulary: any word may follow any other, any number of times. On the real recordings of the
embedded corpus it errs in under 1 % of the words; an open vocabulary would make it useless.
"""

import re
from collections.abc import Sequence

import numpy as np

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.word_errors import normalizer

MODEL_SAMPLE_RATE = 16_000  # Hz, of PocketSphinx's English model
# The model was trained on speech with pauses around it: without them it hears words in the edges
# (measured on the corpus: 5.2 % of the words wrong instead of 0.6 %).
EDGE_SILENCE_SECONDS = 0.3
# Likelihood factor per word; with the library's own 0.65 it hears short words in the breath at the
# end (1.2 % wrong instead of 0.6 %).
WORD_INSERTION_PENALTY = 1e-3
# Amplitude of a sound that is none; of complete silence the grammar, which asks for a word, makes one.
SILENT_BELOW = 1e-4
_BETWEEN_WORDS = re.compile(r"[\s\u2010-\u2015-]+")  # blanks, hyphens and dashes


class KeywordRecognizer:
    """Recognizes the words of a vocabulary, and of every other sound the word that is nearest.

    Each call is independent of the calls before.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        """Raises InputError for a word that is not in PocketSphinx's English dictionary."""
        from pocketsphinx import Decoder

        # No language model: the grammar takes its place. The log would go to standard error. The second pass
        # over the word lattice ("bestpath") now and then finds no path and returns nothing where the
        # first pass has heard words.
        self.decoder = Decoder(
            samprate=MODEL_SAMPLE_RATE,
            lm=None,
            loglevel="FATAL",
            wip=WORD_INSERTION_PENALTY,
            bestpath=False,
        )
        self.vocabulary = tuple(dict.fromkeys(vocabulary))
        self.name = f"word loop over {len(self.vocabulary)} words (PocketSphinx)"
        # A pronunciation's name, such as "read(2)", is in the dictionary and would break the grammar.
        for word in vocabulary:
            if not word or "(" in word or self.decoder.lookup_word(word) is None:
                raise InputError(
                    f"vocabulary word '{word}' is not in PocketSphinx's English dictionary; take words in "
                    "lower case that it knows"
                )
        grammar = f"#JSGF V1.0; grammar words; public <text> = ({' | '.join(self.vocabulary)})+;"
        self.decoder.add_jsgf_string("words", grammar)
        self.decoder.activate_search("words")
        # Its running estimate of the channel, put back before every call.
        self.channel_mean = self.decoder.get_cmn()

    def check_texts(self, texts: Sequence[str], languages: Sequence[str] = ()) -> None:
        """Raises InputError unless every word of the texts, whatever its case, is in the vocabulary.

        A digit is its word; 86 is not, for it is said as "eighty six".
        """
        normalize = normalizer("en")
        known = set(map(normalize, self.vocabulary))
        words = dict.fromkeys(word for text in texts for word in _BETWEEN_WORDS.split(text))
        spoken = [word for word in words if any(map(str.isalnum, word))]
        unknown = [word for word in spoken if normalize(word) not in known]
        if unknown:
            raise InputError(
                f"the texts have {len(unknown)} words that the {self.name} cannot hear, the first is "
                f"'{unknown[0]}', and it would write down other words for them; take an open recognizer, "
                "such as whisper:large-v3 or whisper:FOLDER, or a vocabulary that has all words"
            )

    def transcribe(self, sound: Sound, language: str = "") -> str:
        """Words heard, with blanks between; empty where it hears none."""
        edge = int(EDGE_SILENCE_SECONDS * MODEL_SAMPLE_RATE)
        heard = sound.samples(MODEL_SAMPLE_RATE)
        if np.abs(heard).max(initial=0.0) < SILENT_BELOW:
            return ""
        samples = np.pad(heard, edge)
        self.decoder.set_cmn(self.channel_mean)
        self.decoder.start_utt()
        self.decoder.process_raw(
            (samples * 32767).round().astype(np.int16).tobytes(), full_utt=True
        )
        self.decoder.end_utt()
        hypothesis = self.decoder.hyp()
        return hypothesis.hypstr if hypothesis is not None else ""
