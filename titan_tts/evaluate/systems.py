"""The systems that are compared, and what each says: a run's checkpoint synthesizes every prompt."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from titan_tts.evaluate.prompts import Prompt
from titan_tts.speak.hub import find_folder
from titan_tts.speak.load_run import (
    LoadedRun,
    check_weights,
    find_checkpoint,
)
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.sampling.speaker_embedding import speaker_embeddings
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.text.vocabulary import named

_SHOWN = 5


@dataclass
class System:
    """One model with everything that it speaks with."""

    name: str
    synthesizer: Synthesizer
    batch_size: int = 16

    wall_seconds: float = field(default=0.0, init=False)
    """spent on sampling and decoding so far"""

    audio_seconds: float = field(default=0.0, init=False)
    """made by it"""

    def speak(self, prompts: Sequence[Prompt], seed: int) -> Iterator[tuple[int, Sound]]:
        """(place, its speech) of each prompt, those of similar length together."""
        said = [
            Utterance(p.text, Voice(p.reference, p.speaker, p.reference_text), p.metadata)
            for p in prompts
        ]
        requests = self.synthesizer.requests(said)
        began = time.perf_counter()
        for place, speech in self.synthesizer.speak_sorted(requests, seed, self.batch_size):
            self.wall_seconds += time.perf_counter() - began
            sound = Sound(speech.waveform, speech.sample_rate, speech.latents)
            self.audio_seconds += sound.seconds
            yield place, sound
            began = time.perf_counter()


@dataclass(frozen=True)
class Place:
    """Where a system is: the run's folder, the checkpoint's step and the weights in it, and a short name."""

    folder: str
    step: int
    weights: str
    """empty: as `load_run` chooses"""

    name: str = ""


def find_places(
    texts: Sequence[str], step: "int | str | None" = None, weights: str = ""
) -> list[Place]:
    """The places of RUN, RUN@STEP or RUN@STEP:WEIGHTS.

    Args:
        step, weights: of those that name none; None: the last.

    Raises:
        InputError: no run, no such checkpoint, or one is given twice.
    """
    places = [_find_place(text, step, weights) for text in texts]
    for place, text in zip(places, texts, strict=True):
        if places.count(place) > 1:
            raise InputError(f"{text}: step {place.step} is given twice; give each system once")
    folders = {Path(place.folder).resolve() for place in places}
    short = len({folder.name for folder in folders}) == len(folders)
    # Weights are named where they tell systems apart.
    several = len({place.weights for place in places}) > 1
    named = []
    for place in places:
        name = Path(place.folder).resolve().name if short else place.folder
        behind = f":{place.weights}" if several and place.weights else ""
        named.append(replace(place, name=f"{name}@{place.step}{behind}"))
    return named


def _find_place(text: str, step: "int | str | None", weights: str) -> Place:
    folder, at, given = text.rpartition("@")
    if not at or Path(text).is_dir():
        folder = text
    else:
        number, colon, of_place = given.partition(":")
        step = int(number) if number.isdecimal() else number
        weights = of_place if colon else weights
    folder = os.path.normpath(folder)
    found = find_folder(folder)
    config = load_run_config(found)
    place = Place(folder, *find_checkpoint(found, config, step, weights))
    check_weights(found, config, place.step, place.weights)
    return place


def own_voice(run: LoadedRun) -> Callable[[Tensor], Tensor]:
    """The run's own speaker encoder: latents (T, C) -> embedding (E,)."""
    limit = run.config.data.max_speaker_frames

    @torch.no_grad()
    def embed(latents: Tensor) -> Tensor:
        return speaker_embeddings(run.model, run.tokenizer, [latents], limit, run.device)[0]

    return embed


def untrained_tokens(run: LoadedRun, prompts: Sequence[Prompt]) -> list[str]:
    """Characters and label values of the prompts that the run was not trained with, one line per kind."""
    characters = {c for prompt in prompts for c in run.tokenizer.unknown_characters(prompt.text)}
    kinds = {"characters": characters} if characters else {}
    for prompt in prompts:
        for name, value in run.tokenizer.unknown_values(prompt.metadata).items():
            kinds.setdefault(f"values of {name!r}", set()).add(value)
    return [
        f"{len(values)} {kind} that the run was not trained with ({named(sorted(values), _SHOWN)})"
        for kind, values in kinds.items()
    ]
