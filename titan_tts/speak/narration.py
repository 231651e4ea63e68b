"""Long texts, several takes and many texts at once, with one synthesizer."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from titan_tts.speak.joining import joined
from titan_tts.speak.synthesizer import Speech, Synthesizer, Utterance
from torchtitan.models.dit_tts.speech.scoring.interface import Recognizer, Sound
from torchtitan.models.dit_tts.speech.scoring.scores import Scorers, score
from torchtitan.models.dit_tts.speech.scoring.word_errors import Errors


@dataclass(frozen=True)
class Take:
    """A piece as it was said, and what the recognizer heard; without one nothing is heard."""

    speech: Speech
    number: int = 0
    heard: str | None = None
    errors: Errors | None = None

    def rank(self) -> tuple[int, int, int]:
        """The lower the better: wrong words, wrong characters, then the order in which they were made."""
        if self.errors is None:
            return 0, 0, self.number
        return self.errors.word_errors, self.errors.character_errors, self.number


@dataclass
class Narrator:
    """Says texts in pieces."""

    synthesizer: Synthesizer
    seed: int = 0
    batch_size: int = 16
    """utterances, takes counted, that are said together"""

    takes: int = 1
    """of each piece, of which the recognizer chooses the best"""

    recognizer: Recognizer | None = None

    wall_seconds: float = field(default=0.0, init=False)
    """spent on sampling and decoding so far, of all takes"""

    def say(self, utterances: Sequence[Utterance]) -> list[Take]:
        """The best take of each, in their order."""
        best = dict(self._say_each(utterances))
        return [best[place] for place in range(len(utterances))]

    def _say_each(self, utterances: Sequence[Utterance]) -> Iterator[tuple[int, Take]]:
        """(place, best take) of each, as soon as it is there."""
        numbered = [
            (place, replace(each, take=number))
            for place, each in enumerate(utterances)
            for number in range(self.takes)
        ]
        requests = self.synthesizer.requests([each for _, each in numbered])
        made: list[list[Take]] = [[] for _ in utterances]
        began = time.perf_counter()
        for index, speech in self.synthesizer.speak_sorted(requests, self.seed, self.batch_size):
            self.wall_seconds += time.perf_counter() - began
            place, utterance = numbered[index]
            made[place].append(self._heard(speech, utterance))
            if len(made[place]) == self.takes:
                yield place, min(made[place], key=Take.rank)
                made[place] = []
            began = time.perf_counter()

    def _heard(self, speech: Speech, utterance: Utterance) -> Take:
        if self.recognizer is None:
            return Take(speech, utterance.take)
        found = score(
            Sound(speech.waveform, speech.sample_rate, speech.latents),
            utterance.text,
            Scorers(self.recognizer),
            language=str(utterance.conditions.get("language") or ""),
        )
        return Take(speech, utterance.take, found.heard, found.errors)

    def stream(self, pieces: Sequence[Utterance], soon: bool = False) -> Iterator[Take]:
        """The pieces of one text in order, in batches.

        Args:
            soon: the first is said alone, to be there sooner.
        """
        size = max(1, self.batch_size // self.takes)
        first = 1 if soon else size
        starts = range(first, len(pieces), size)
        for group in (pieces[:first], *(pieces[start : start + size] for start in starts)):
            yield from self.say(group)

    def say_all(self, texts: Sequence[Sequence[Utterance]]) -> Iterator[tuple[int, list[Take]]]:
        """(place, takes) of each text's pieces, as soon as it is complete; batched across the texts."""
        found: list[dict[int, Take]] = [{} for _ in texts]
        chosen = [(place, n) for place, pieces in enumerate(texts) for n in range(len(pieces))]
        for index, take in self._say_each([texts[place][number] for place, number in chosen]):
            place, number = chosen[index]
            found[place][number] = take
            if len(found[place]) == len(texts[place]):
                yield place, [found[place][number] for number in range(len(texts[place]))]
                found[place] = {}

    def waveforms(self, takes: Iterator[Take] | Sequence[Take], count: int) -> Iterator[Tensor]:
        """The sound of one text of `count` pieces, piece by piece."""
        return joined((take.speech.waveform for take in takes), count, self.synthesizer.sample_rate)
