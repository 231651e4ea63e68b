"""Requests to sound files, with a report line."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from titan_tts.speak.request_lists import Request
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import SHOWN, Speech, Utterance, Voice, check_text, join, part
from titan_tts.speak.word_times import as_json, subtitles
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.sampling.sound_files import (
    SUFFIXES,
    encoded,
    pcm,
    wav_header,
)
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, unicode_bytes
from torchtitan.models.dit_tts.text.vocabulary import named

_BATCHES = 16
"""of a list, among which texts are sorted by length"""

_VOICES = 256
"""voices in memory; others are loaded again"""


@dataclass
class Narrator:
    """Synthesizes requests and writes their sound."""

    synthesizer: Synthesizer
    seed: int = 0
    batch_size: int = 16
    """pieces of texts per batch"""

    settings: str = ""
    """the command's options, for `Request.fingerprint`"""

    timestamps: Sequence[str] = ()
    """json, srt or vtt: files with the words' times, next to each sound"""

    def __post_init__(self) -> None:
        self._voice = lru_cache(_VOICES)(self._load_voice)

    def check(self, request: Request) -> None:
        """Raises InputError for a text that the model cannot say and for a voice that cannot be loaded."""
        tokenizer = self.synthesizer.run.tokenizer
        try:
            check_text(request.text, tokenizer, request.where)
            self._utterance(request)
            tokenizer.encode(request.text)
            unicode_bytes(request.reference_text)
        except InputError as error:
            raise request.located(error) from None

    def _utterance(self, request: Request) -> Utterance:
        voice = self.synthesizer.default_voice
        if request.names_voice:
            given = request.reference, request.reference_text, request.speaker
            voice = self._voice(*given)
        conditions = self.synthesizer.conditions(voice, request.caption)
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
        rate, spoken, latency = self.synthesizer.sample_rate, list[Speech](), ""
        if (out or kind).lower().endswith("wav"):  # that it holds too little is told now
            header = wav_header(self.synthesizer.samples(pieces), rate)
            if streams:
                sys.stdout.buffer.write(header)
        for speech in self.synthesizer.stream(pieces, self.seed, self.batch_size, streams):
            if streams:
                latency = latency or f", first sound after {time.perf_counter() - began:.2f} s"
                sys.stdout.buffer.write(pcm(part(speech.waveform, len(spoken), len(pieces), rate)))
                sys.stdout.buffer.flush()
            spoken.append(speech)
        if out:
            seconds = self._write_files(request, Path(out), pieces, spoken)
        else:
            sound = join(spoken)
            seconds = sound.seconds
            if not streams:
                sys.stdout.buffer.write(encoded(sound.waveform, rate, SUFFIXES[f".{kind}"]))
        run = self.synthesizer.run
        by = "--seconds" if request.seconds is not None else self.synthesizer.lengths.name
        several = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
        return (
            f"{out or 'standard output'}: {seconds:.2f} s (by {by}){several} from step {run.step} "
            f"({run.weights})\n{self._speed(seconds)}{latency}"
        )

    def write_all(self, requests: list[Request], folder: str, kind: str) -> str:
        """Synthesizes many texts, each to NAME.`kind` and NAME.json. Returns a report."""
        remaining, seconds, run = iter(requests), 0.0, self.synthesizer.run
        with tqdm(total=len(requests), unit="text", mininterval=1.0) as bar:
            while chunk := list(islice(remaining, _BATCHES * self.batch_size)):
                pieces = [self.synthesizer.pieces(self._utterance(request)) for request in chunk]
                for index, spoken in self.synthesizer.say(pieces, self.seed, self.batch_size):
                    path = chunk[index].path(folder, kind)
                    path.unlink(missing_ok=True)
                    seconds += self._write_files(chunk[index], path, pieces[index], spoken, True)
                    bar.update()
        return f"{folder}: {len(requests)} texts from step {run.step} ({run.weights}), {self._speed(seconds)}"

    def _write_files(
        self,
        request: Request,
        path: Path,
        pieces: Sequence[Utterance],
        spoken: Sequence[Speech],
        described: bool = False,
    ) -> float:
        """Writes a text's sound, and what `timestamps` asks for. Returns its seconds. `described`: NAME.json without words
        is written, too."""
        run, sound = self.synthesizer.run, join(spoken)
        about: dict[str, Any] = {
            "text": request.text,
            "seconds": round(sound.seconds, 3),
            "pieces": len(spoken),
            "step": run.step,
            "weights": run.weights,
            "seed": self.seed,
            "request": request.fingerprint(self.settings),
        }
        if self.timestamps:
            words = self.synthesizer.word_times([each.text for each in pieces], spoken)
            for kind in {*self.timestamps} - {"json"}:
                write_atomic(path.with_suffix(f".{kind}"), subtitles(words, kind))
            if "json" in self.timestamps:
                about["words"] = as_json(words)
        if described or "words" in about:
            write_atomic(path.with_suffix(".json"), json.dumps(about, indent=1) + "\n")
        sound.save(path)  # last: its presence means that the text is done
        return sound.seconds

    def _speed(self, seconds: float) -> str:
        wall = self.synthesizer.seconds_spent
        return f"{wall:.2f} s for {seconds:.2f} s of speech (real-time factor {wall / seconds:.3f})"


def checked_conditions(request: Request, tokenizer: ConditionedTokenizer) -> dict[str, str]:
    """The request's values of conditioning tokens, named as in a sample's JSON. A field that it leaves out gets the
    unknown token, as in the fraction [data] conditioning_dropout of the training samples."""
    known = {k: v for k, v in tokenizer.vocabulary.conditioning.items() if k != "duration"}
    for name, value in request.conditions.items():
        about = f"{request.where}: condition {name}={value}, but the run"
        if name not in known:
            has = f"the conditioning tokens {', '.join(known)} only"
            instead = "give --seconds instead" if name == "duration" else "leave it out"
            raise InputError(f"{about} has {has if known else 'no conditioning tokens'}; {instead}")
        if value not in known[name]:
            shown = named(known[name], SHOWN)
            raise InputError(f"{about} was not trained with it; it knows: {shown}")
    return dict(request.conditions)
