"""The systems that are compared, and their speech: a run's checkpoint synthesizes every prompt."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_tts.evaluate.prompts import Prompt
from titan_tts.speak.joining import join
from titan_tts.speak.load_run import LoadedRun
from titan_tts.speak.open_run import open_run
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts.data.members import caption_of
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import file_name, unique
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.text.vocabulary import named

_SHOWN = 5


def speak(
    synthesizer: Synthesizer, prompts: Sequence[Prompt], seed: int, batch_size: int
) -> Iterator[tuple[int, Sound]]:
    """(index, speech) of each prompt, in batches of similar length; of long ones in pieces, as `generate` says them."""
    pieces = []
    for each in prompts:
        voice = Voice(each.voice, each.speaker, each.reference_text)
        pieces.append(synthesizer.pieces(Utterance(each.text, voice, each.labels)))
    for index, spoken in synthesizer.say(pieces, seed, batch_size):
        yield index, join(spoken)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a system."""

    folder: str
    """the run's folder"""

    step: int
    weights: str
    """empty: `load_run` chooses"""

    name: str = ""
    """short, unique among the systems"""


def find_checkpoints(
    texts: Sequence[str], step: "int | str | None" = None, weights: str = ""
) -> list[Checkpoint]:
    """The checkpoints of RUN, RUN@STEP or RUN@STEP:WEIGHTS, each with a name. `step`, `weights`:
    for texts without them; None: the last step.
    """
    found = [_find_checkpoint(text, step, weights) for text in texts]
    for each, text in zip(found, texts, strict=True):
        if found.count(each) > 1:
            raise InputError(f"{text}: step {each.step} is given twice; give each system once")
    folders = {Path(each.folder).resolve() for each in found}
    short = len({folder.name for folder in folders}) == len(folders)
    # Weights are named where they tell systems apart.
    several = len({each.weights for each in found}) > 1
    named = []
    for each in found:
        name = Path(each.folder).resolve().name if short else each.folder
        behind = f":{each.weights}" if several and each.weights else ""
        named.append(replace(each, name=f"{name}@{each.step}{behind}"))
    return named


def _find_checkpoint(text: str, step: "int | str | None", weights: str) -> Checkpoint:
    folder, at, given = text.rpartition("@")
    if not at or Path(text).is_dir():
        folder = text
    else:
        number, colon, given_weights = given.partition(":")
        step = int(number) if number.isdecimal() else number
        weights = given_weights if colon else weights
    folder = os.path.normpath(folder)
    found = open_run(folder, step, weights)
    found.find_weights()
    return Checkpoint(folder, found.step, found.weights)


def wav_path(
    folder: Path, systems: Sequence[str], name: str, seed: int | None, utterance: str
) -> Path:
    """The file of a system's speech; `systems`: the names of all in this folder."""
    own = unique([file_name(each) for each in systems], str.lower)[systems.index(name)]
    return folder / "wavs" / own / f"seed-{seed}" / f"{utterance}.wav"


def untrained_tokens(run: LoadedRun, prompts: Sequence[Prompt]) -> list[str]:
    """A line for each kind of tokens of the prompts that the run was not trained with."""
    characters = {c for prompt in prompts for c in run.tokenizer.unknown_characters(prompt.text)}
    kinds = {"characters": characters} if characters else {}
    for prompt in prompts:
        for name, value in run.tokenizer.unknown_values(prompt.labels).items():
            kinds.setdefault(f"values of {name!r}", set()).add(value)
    captions = {caption_of(prompt.labels) for prompt in prompts} - {""}
    if captions and not run.config.data.max_caption_tokens:
        kinds["captions"] = captions
    return [
        f"{len(values)} {kind} that the run was not trained with ({named(sorted(values), _SHOWN)})"
        for kind, values in kinds.items()
    ]
