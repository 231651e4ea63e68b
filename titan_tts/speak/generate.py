"""Requests to sound files, and a line about them."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from titan_tts.speak.narration import Narrator, Take
from titan_tts.speak.request_lists import Request
from titan_tts.speak.sampling_options import (
    SHOWN,
    check_text,
    warn_of_untrained_tokens,
)
from titan_tts.speak.synthesizer import Utterance, Voice
from torchtitan.models.dit_tts.errors import InputError, show
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.sampling.sound_files import (
    STREAMED,
    SUFFIXES,
    encoded,
    pcm,
    wav_header,
    write_sound,
)
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, unicode_bytes
from torchtitan.models.dit_tts.text.vocabulary import named

_BATCHES = 16
"""of a list, among which texts are sorted by length"""

_VOICES = 256
"""that are kept; others are loaded again"""


class Generation:
    """Says requests and writes them.

    Args:
        loudness: of references, as `Synthesizer.recording` takes it.
        settings: tell one command from another, for `Request.fingerprint`.
    """

    def __init__(
        self,
        narrator: Narrator,
        loudness: float | Literal["off"] | None = None,
        settings: str = "",
    ):
        self.narrator, self.loudness, self.settings = narrator, loudness, settings
        self.synthesizer = narrator.synthesizer
        self._voice = lru_cache(_VOICES)(self._load_voice)

    def check(self, request: Request, warn: bool) -> None:
        """Raises InputError for what the model cannot say, and for a voice that cannot be loaded.

        Args:
            warn: of what it was not trained on.
        """
        tokenizer, data = self.synthesizer.run.tokenizer, self.synthesizer.run.config.data
        check_text(request.text, tokenizer, request.where)
        try:
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
                f"{longest:g} s; without --seconds the text is said in pieces",
                sys.stderr,
            )

    def _utterance(self, request: Request) -> Utterance:
        conditions = requested_conditions(request, self.synthesizer.run.tokenizer)
        voice = self._voice(request.reference, request.reference_text, request.speaker)
        return Utterance(request.text, voice, conditions, request.seconds)

    def _load_voice(self, reference: str, text: str, speaker: str) -> Voice:
        if reference:
            return self.synthesizer.recording(reference, self.loudness, text)
        return self.synthesizer.speaker(speaker) if speaker else Voice()

    def write(self, request: Request, out: str, kind: str) -> str:
        """Says one text, to a file or to the standard output.

        Args:
            out: the file; empty: the standard output, piece by piece where `kind` allows it.
            kind: format of the standard output.

        Returns:
            A line about it.
        """
        began = time.perf_counter()
        streams = not out and kind in STREAMED
        pieces = self.synthesizer.pieces(self._utterance(request), soon=streams)
        _check_fits(request, self.synthesizer.samples(pieces), out or kind)
        takes: list[Take] = []
        empty = torch.zeros(0)
        first: list[float] = []

        def noted() -> Iterator[Take]:
            for take in self.narrator.stream(pieces, soon=streams):
                first.append(time.perf_counter() - began)
                # Of a long text only what the report needs.
                takes.append(
                    replace(take, speech=replace(take.speech, waveform=empty, latents=empty))
                )
                yield take

        sounds, rate = self.narrator.waveforms(noted(), len(pieces)), self.synthesizer.sample_rate
        if streams:
            samples = self._stream(sounds, pieces, kind)
        else:
            whole = torch.cat(list(sounds))
            samples = len(whole)
            if out:
                write_sound(out, whole, rate)
            else:
                sys.stdout.buffer.write(encoded(whole, rate, SUFFIXES[f".{kind}"]))
        run, about = self.synthesizer.run, self._about(request, takes, samples / rate)
        by = "--seconds" if request.seconds is not None else self.synthesizer.lengths.name
        heard = ""
        if "heard" in about:
            wrong = f"{about['word_errors']} of {about['words']} words wrong"
            heard = f"heard, with {wrong}: {about['heard']}\n"
        several = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
        return (
            f"{out or 'standard output'}: {samples / rate:.2f} s (by {by}){several} from step {run.step} "
            f"({run.weights})\n{heard}{self._speed(samples / rate)}"
            f"{f', first sound after {first[0]:.2f} s' if streams else ''}"
        )

    def _stream(self, sounds: Iterator[Tensor], pieces: list[Utterance], kind: str) -> int:
        """Writes the sounds to the standard output as they come. Returns the samples."""
        out, samples = sys.stdout.buffer, 0
        if kind == "wav":
            length = self.synthesizer.samples(pieces)
            out.write(wav_header(length, self.synthesizer.sample_rate))
        for sound in sounds:
            out.write(pcm(sound))
            out.flush()
            samples += len(sound)
        return samples

    def write_all(self, requests: list[Request], folder: str, kind: str, quiet: bool) -> str:
        """Says many texts, each to its file, with a NAME.json beside it.

        Args:
            kind: format of the files.
            quiet: without a progress bar.

        Returns:
            A line about them.
        """
        remaining, rate, seconds = iter(requests), self.synthesizer.sample_rate, 0.0
        with tqdm(total=len(requests), unit="text", mininterval=1.0, disable=quiet) as bar:
            while chunk := list(islice(remaining, _BATCHES * self.narrator.batch_size)):
                pieces = [self.synthesizer.pieces(self._utterance(request)) for request in chunk]
                for place, takes in self.narrator.say_all(pieces):
                    request = chunk[place]
                    sound = torch.cat(list(self.narrator.waveforms(takes, len(takes))))
                    about = json.dumps(self._about(request, takes, len(sound) / rate), indent=1)
                    path = request.path(folder, kind)
                    _check_fits(request, len(sound), kind)
                    path.unlink(missing_ok=True)
                    write_atomic(path.with_suffix(".json"), about + "\n")
                    write_sound(path, sound, rate)  # last: it says that the text is complete
                    seconds += len(sound) / rate
                    bar.update()
        run = self.synthesizer.run
        speed = f", {self._speed(seconds)}" if requests else ""
        return f"{folder}: {len(requests)} texts from step {run.step} ({run.weights}){speed}"

    def _about(self, request: Request, takes: list[Take], seconds: float) -> dict[str, Any]:
        """The content of NAME.json."""
        run = self.synthesizer.run
        found: dict[str, Any] = {
            "text": request.text,
            "seconds": round(seconds, 3),
            "pieces": len(takes),
            "step": run.step,
            "weights": run.weights,
            "seed": self.narrator.seed,
            "request": request.fingerprint(self.settings),
        }
        if self.narrator.recognizer is not None:
            errors = [take.errors for take in takes if take.errors is not None]
            found["takes"] = [take.number for take in takes]
            found["heard"] = " ".join(take.heard or "" for take in takes)
            found["word_errors"] = sum(each.word_errors for each in errors)
            found["words"] = sum(each.words for each in errors)
        return found

    def _speed(self, seconds: float) -> str:
        wall = self.narrator.wall_seconds
        return f"{wall:.2f} s for {seconds:.2f} s of speech (real-time factor {wall / seconds:.3f})"


def _check_fits(request: Request, samples: int, name: str) -> None:
    """Raises InputError for more sound than a wav's header can tell."""
    if name.endswith("wav") and 2 * samples > 2**32 - 64:
        raise InputError(
            f"{request.where}: takes more than the 4 GiB of a wav; give another format"
        )


def requested_conditions(request: Request, tokenizer: ConditionedTokenizer) -> dict[str, str]:
    """Values of the conditioning tokens but duration, as a sample's JSON names them.

    A field that is not given is left out, and its token is the unknown one, as it is in the fraction
    [data] conditioning_dropout of the training samples.

    Raises:
        InputError: a field that the run does not have, or a value that it was not trained with.
    """
    known = {k: v for k, v in tokenizer.vocabulary.conditioning.items() if k != "duration"}
    for name, value in request.conditions.items():
        if name not in known:
            raise InputError(
                f"{request.where}: condition {name}={value}, but the run has the conditioning tokens "
                f"{', '.join(known) or '(none)'} (the length is --seconds)"
            )
        if value not in known[name]:
            raise InputError(
                f"{request.where}: condition {name}={value}, but the run was not trained with it; it knows: "
                f"{named(known[name], SHOWN)}"
            )
    # A speaker of other shards gives the reference only: the run has no token for it.
    if request.speaker in known.get("speaker", ()):
        return {"speaker": request.speaker} | request.conditions
    return dict(request.conditions)
