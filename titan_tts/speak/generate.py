"""Requests to sound files, with a report line."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from titan_tts.speak.joining import join, joined
from titan_tts.speak.request_lists import Request
from titan_tts.speak.sampling_options import SHOWN, check_text, warn_of_untrained_tokens
from titan_tts.speak.subtitles import as_json, subtitles
from titan_tts.speak.synthesizer import Synthesizer, by_text
from titan_tts.speak.utterance import Speech, Utterance, Voice
from torchtitan.models.dit_tts.errors import InputError, show
from torchtitan.models.dit_tts.files import known_as, write_atomic
from torchtitan.models.dit_tts.speech.sampling.sound_files import (
    SUFFIXES,
    encoded,
    pcm,
    wav_header,
    write_sound,
)
from torchtitan.models.dit_tts.speech.scoring.interface import Recognizer
from torchtitan.models.dit_tts.speech.scoring.scores import Scorers, score
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, unicode_bytes
from torchtitan.models.dit_tts.text.vocabulary import named

_BATCHES = 16
"""of a list, among which texts are sorted by length"""

_MAX_PACE, _MIN_DEVIATION = 2.0, 0.3
"""factor and seconds; a given length that differs from the expected one by more than both is warned of"""

_VOICES = 256
"""voices in memory; others are loaded again"""


@dataclass
class Narrator:
    """Synthesizes requests in pieces, several candidates of each, and writes their sound."""

    synthesizer: Synthesizer
    seed: int = 0
    batch_size: int = 16
    """utterances per batch, candidates counted"""

    candidates: int = 1
    """per piece; the recognizer chooses the best"""

    recognizer: Recognizer | None = None
    settings: str = ""
    """the command's options, for `Request.fingerprint`"""

    timestamps: Sequence[str] = ()
    """json, srt or vtt: files with the words' times, beside each sound"""

    cue_words: int = 0
    """see `subtitles`"""

    def __post_init__(self) -> None:
        self._voice = lru_cache(_VOICES)(self._load_voice)

    def check(self, request: Request, warn: bool) -> None:
        """Raises InputError for a text that the model cannot say and for a voice that cannot be loaded. `warn`: also
        warn about requests unlike the training data."""
        tokenizer, data = self.synthesizer.run.tokenizer, self.synthesizer.run.config.data
        try:
            check_text(request.text, tokenizer, request.where)
            utterance = self._utterance(request)
            tokenizer.encode(request.text)
            unicode_bytes(request.reference_text)
        except InputError as error:
            raise request.located(error) from None
        if warn:
            warn_of_untrained_tokens(dict(utterance.conditions), tokenizer)
        longest = data.max_frames / data.frames_per_second
        if warn and (request.seconds or 0) > longest:
            show(
                f"warning: --seconds = {request.seconds:g}, but no utterance of training is longer than "
                f"{longest:g} s; without --seconds the text is split into pieces",
                sys.stderr,
            )
        elif warn and request.seconds is not None:
            with suppress(InputError):  # a length that is given needs no estimate
                self._warn_of_pace(request.seconds, utterance)

    def _warn_of_pace(self, seconds: float, utterance: Utterance) -> None:
        """Warns of a length, in seconds, that is far from the text's expected one."""
        frames = self.synthesizer.lengths.frames([replace(utterance, frames=None)])[0]
        expected = frames / self.synthesizer.codec.frames_per_second
        low, high = expected / _MAX_PACE, expected * _MAX_PACE
        if abs(seconds - expected) > _MIN_DEVIATION and not low < seconds < high:
            show(
                f"warning: --seconds = {seconds:g}, but the text takes about {expected:.2g} s, and between {low:.2g} and "
                f"{high:.2g} s in this voice; leave --seconds out",
                sys.stderr,
            )

    def _utterance(self, request: Request) -> Utterance:
        if request.names_voice:
            named = request.reference_files, request.reference_text, request.speaker
            voice = self._voice(*named)
        else:
            voice = self.synthesizer.default_voice
        conditions = self.synthesizer.conditions(voice)
        conditions |= checked_conditions(request, self.synthesizer.run.tokenizer)
        frames = None
        if request.seconds is not None:
            frames = max(1, round(request.seconds * self.synthesizer.codec.frames_per_second))
        return Utterance(request.text, voice, conditions, frames)

    def _load_voice(self, reference: tuple[str, ...], text: str, speaker: str) -> Voice:
        if reference:
            return self.synthesizer.recording(reference, text)
        return self.synthesizer.speaker(speaker) if speaker else Voice()

    def write(self, request: Request, out: str, kind: str) -> str:
        """Synthesizes one text to a file or to the standard output. Returns a report.

        Args:
            out: the file; empty: the standard output, piece by piece where `kind` allows it.
            kind: format of the standard output.
        """
        began = time.perf_counter()
        streams = not out and self.synthesizer.streams(kind)
        pieces = self.synthesizer.pieces(self._utterance(request), low_latency=streams)
        rate, header = self.synthesizer.sample_rate, b""
        if (out or kind).lower().endswith("wav"):  # that it holds too little is told now
            header = wav_header(self.synthesizer.samples(pieces), rate)
        spoken: list[Speech] = []
        empty, first_sound, samples = torch.zeros(0), 0.0, 0

        def waveforms() -> Iterator[Tensor]:
            nonlocal first_sound
            for speech in self.stream(pieces, low_latency=streams):
                first_sound = first_sound or time.perf_counter() - began
                # A long text's sound is not kept in memory, unless it is aligned.
                kept = speech if self.timestamps else replace(speech, waveform=empty, latents=empty)
                spoken.append(kept)
                yield speech.waveform

        sounds = joined(waveforms(), len(pieces), rate)
        if streams:
            sys.stdout.buffer.write(header)
            for sound in sounds:
                sys.stdout.buffer.write(pcm(sound))
                sys.stdout.buffer.flush()
                samples += len(sound)
        else:
            whole = torch.cat(list(sounds))
            samples = len(whole)
            if out:
                write_sound(out, whole, rate)
            else:
                sys.stdout.buffer.write(encoded(whole, rate, SUFFIXES[f".{kind}"]))
        run, about = self.synthesizer.run, self._about(request, spoken, samples / rate)
        if self.timestamps:
            self._write_times(Path(out), about, pieces, spoken)
            if "words" in about:
                write_atomic(Path(out).with_suffix(".json"), json.dumps(about, indent=1) + "\n")
        by = "--seconds" if request.seconds is not None else self.synthesizer.lengths.name
        heard = ""
        if "heard" in about:
            wrong = f"{about['word_errors']} of {about['words']} words wrong"
            heard = f"heard, with {wrong}: {about['heard']}\n"
        several = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
        return (
            f"{out or 'standard output'}: {samples / rate:.2f} s (by {by}){several} from step {run.step} "
            f"({run.weights})\n{heard}{self._speed(samples / rate)}"
            f"{f', first sound after {first_sound:.2f} s' if streams else ''}"
        )

    def write_all(self, requests: list[Request], folder: str, kind: str, quiet: bool) -> str:
        """Synthesizes many texts, each to NAME.`kind` and NAME.json. Returns a report. `quiet`: without a bar."""
        remaining, rate, seconds = iter(requests), self.synthesizer.sample_rate, 0.0
        with tqdm(total=len(requests), unit="text", mininterval=1.0, disable=quiet) as bar:
            while chunk := list(islice(remaining, _BATCHES * self.batch_size)):
                pieces = [self.synthesizer.pieces(self._utterance(request)) for request in chunk]
                flat = [piece for each in pieces for piece in each]
                for index, spoken in by_text(pieces, self.synthesize(flat)):
                    request = chunk[index]
                    sound = join([each.waveform for each in spoken], rate)
                    about = self._about(request, spoken, len(sound) / rate)
                    path = request.path(folder, kind)
                    path.unlink(missing_ok=True)
                    self._write_times(path, about, pieces[index], spoken)
                    write_atomic(path.with_suffix(".json"), json.dumps(about, indent=1) + "\n")
                    write_sound(path, sound, rate)  # last: its presence means that the text is done
                    seconds += len(sound) / rate
                    bar.update()
        run = self.synthesizer.run
        speed = f", {self._speed(seconds)}" if requests else ""
        return f"{folder}: {len(requests)} texts from step {run.step} ({run.weights}){speed}"

    def _write_times(
        self,
        path: Path,
        about: dict[str, Any],
        pieces: Sequence[Utterance],
        spoken: Sequence[Speech],
    ) -> None:
        """Writes the subtitles beside the sound at `path`, and puts the words into `about`, as `timestamps` says."""
        if self.timestamps:
            words = self.synthesizer.word_times([each.text for each in pieces], spoken)
        for kind in self.timestamps:
            if kind == "json":
                about["words"] = as_json(words)
            else:
                content = subtitles(words, kind, self.cue_words)
                write_atomic(path.with_suffix(f".{kind}"), content)

    def _about(self, request: Request, spoken: list[Speech], seconds: float) -> dict[str, Any]:
        """The content of NAME.json."""
        run = self.synthesizer.run
        about: dict[str, Any] = {
            "text": request.text,
            "seconds": round(seconds, 3),
            "pieces": len(spoken),
            "step": run.step,
            "weights": run.weights,
            "seed": self.seed,
            "request": request.fingerprint(self.settings),
        }
        if self.recognizer is not None:
            errors = [each.errors for each in spoken if each.errors is not None]
            about["takes"] = [each.candidate for each in spoken]
            about["heard"] = " ".join(each.transcript or "" for each in spoken)
            about["word_errors"] = sum(each.word_errors for each in errors)
            about["words"] = sum(each.words for each in errors)
        return about

    def _speed(self, seconds: float) -> str:
        wall = self.synthesizer.seconds_spent
        return f"{wall:.2f} s for {seconds:.2f} s of speech (real-time factor {wall / seconds:.3f})"

    def synthesize(self, utterances: Sequence[Utterance]) -> Iterator[tuple[int, Speech]]:
        """(index, best candidate) of each utterance, as soon as it is complete."""
        numbered = [
            replace(each, candidate=number)
            for each in utterances
            for number in range(self.candidates)
        ]
        made: list[list[Speech]] = [[] for _ in utterances]
        spoken = self.synthesizer.speak_sorted(numbered, self.seed, self.batch_size)
        for place, speech in spoken:
            index = place // self.candidates
            made[index].append(self._transcribed(speech, numbered[place]))
            if len(made[index]) == self.candidates:
                yield index, min(made[index], key=_badness)
                made[index] = []

    def _transcribed(self, speech: Speech, utterance: Utterance) -> Speech:
        if self.recognizer is None:
            return replace(speech, candidate=utterance.candidate)
        found = score(
            speech,
            utterance.text,
            Scorers(self.recognizer, added=self.synthesizer.run.tokenizer.added),
            language=str(utterance.conditions.get("language") or ""),
        )
        return replace(
            speech, candidate=utterance.candidate, transcript=found.heard, errors=found.errors
        )

    def stream(self, pieces: Sequence[Utterance], low_latency: bool = False) -> Iterator[Speech]:
        """Synthesizes the pieces of one text in order, in batches. `low_latency`: the first is a batch of its own."""
        size = max(1, self.batch_size // self.candidates)
        first = 1 if low_latency else size
        starts = range(first, len(pieces), size)
        for group in (pieces[:first], *(pieces[start : start + size] for start in starts)):
            best = dict(self.synthesize(group))
            yield from (best[index] for index in range(len(group)))


def _badness(speech: Speech) -> tuple[int, int, int]:
    """Wrong words, then wrong characters, then the order of the candidates."""
    if speech.errors is None:
        return 0, 0, speech.candidate
    return speech.errors.word_errors, speech.errors.character_errors, speech.candidate


def checked_conditions(request: Request, tokenizer: ConditionedTokenizer) -> dict[str, str]:
    """The request's values of conditioning tokens, named as in a sample's JSON. A field that it leaves out gets the
    unknown token, as in the fraction [data] conditioning_dropout of the training samples."""
    known = {k: v for k, v in tokenizer.vocabulary.conditioning.items() if k != "duration"}
    found = {name: known_as(v, known.get(name, ())) for name, v in request.labels.items()}
    for name, value in found.items():
        about = f"{request.where}: condition {name}={value}, but the run"
        if name not in known:
            has = f"the conditioning tokens {', '.join(known)} only"
            instead = "give --seconds instead" if name == "duration" else "leave it out"
            raise InputError(f"{about} has {has if known else 'no conditioning tokens'}; {instead}")
        if value not in known[name]:
            shown = named(known[name], SHOWN)
            raise InputError(f"{about} was not trained with it; it knows: {shown}")
    return found
