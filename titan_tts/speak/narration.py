"""Synthesizes long texts, several candidates of a piece, and many texts at once."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Speech, Utterance
from torchtitan.models.dit_tts.speech.scoring.interface import Recognizer, Sound
from torchtitan.models.dit_tts.speech.scoring.scores import Scorers, score


@dataclass
class Narrator:
    """Synthesizes texts in pieces."""

    synthesizer: Synthesizer
    seed: int = 0
    batch_size: int = 16
    """utterances per batch, candidates counted"""

    candidates: int = 1
    """per piece; the recognizer chooses the best"""

    recognizer: Recognizer | None = None

    wall_seconds: float = field(default=0.0, init=False)
    """spent on sampling and decoding so far, of all candidates"""

    def synthesize(self, utterances: Sequence[Utterance]) -> list[Speech]:
        """The best candidate of each utterance, in their order."""
        best = dict(self._synthesize_each(utterances))
        return [best[index] for index in range(len(utterances))]

    def _synthesize_each(self, utterances: Sequence[Utterance]) -> Iterator[tuple[int, Speech]]:
        """(index, best candidate) of each utterance, as soon as it is complete."""
        numbered = [
            (index, replace(each, candidate=number))
            for index, each in enumerate(utterances)
            for number in range(self.candidates)
        ]
        requests = self.synthesizer.requests([each for _, each in numbered])
        made: list[list[Speech]] = [[] for _ in utterances]
        began = time.perf_counter()
        for request, speech in self.synthesizer.speak_sorted(requests, self.seed, self.batch_size):
            self.wall_seconds += time.perf_counter() - began
            index, utterance = numbered[request]
            made[index].append(self._transcribed(speech, utterance))
            if len(made[index]) == self.candidates:
                yield index, min(made[index], key=_badness)
                made[index] = []
            began = time.perf_counter()

    def _transcribed(self, speech: Speech, utterance: Utterance) -> Speech:
        if self.recognizer is None:
            return replace(speech, candidate=utterance.candidate)
        found = score(
            Sound(speech.waveform, speech.sample_rate, speech.latents),
            utterance.text,
            Scorers(self.recognizer, added=self.synthesizer.run.tokenizer.added),
            language=str(utterance.conditions.get("language") or ""),
        )
        return replace(
            speech, candidate=utterance.candidate, transcript=found.heard, errors=found.errors
        )

    def stream(self, pieces: Sequence[Utterance], low_latency: bool = False) -> Iterator[Speech]:
        """Synthesizes the pieces of one text in order, in batches. `low_latency`: the first piece
        is a batch of its own.
        """
        size = max(1, self.batch_size // self.candidates)
        first = 1 if low_latency else size
        starts = range(first, len(pieces), size)
        for group in (pieces[:first], *(pieces[start : start + size] for start in starts)):
            yield from self.synthesize(group)

    def synthesize_all(
        self, texts: Sequence[Sequence[Utterance]]
    ) -> Iterator[tuple[int, list[Speech]]]:
        """(index, speech of its pieces) of each text, as soon as it is complete; batched across the texts."""
        done: list[dict[int, Speech]] = [{} for _ in texts]
        pieces = [(text, number) for text, each in enumerate(texts) for number in range(len(each))]
        for index, speech in self._synthesize_each([texts[text][n] for text, n in pieces]):
            text, number = pieces[index]
            done[text][number] = speech
            if len(done[text]) == len(texts[text]):
                yield text, [done[text][n] for n in range(len(texts[text]))]
                done[text] = {}


def _badness(speech: Speech) -> tuple[int, int, int]:
    """Wrong words, then wrong characters, then the order of the candidates."""
    if speech.errors is None:
        return 0, 0, speech.candidate
    return speech.errors.word_errors, speech.errors.character_errors, speech.candidate
