"""The systems that are compared, and their speech: a run's checkpoint synthesizes every prompt."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_tts.evaluate.options import NO_RUN, Options
from titan_tts.evaluate.prompts import Prompt
from titan_tts.speak.joining import join
from titan_tts.speak.load_run import LoadedRun
from titan_tts.speak.open_run import OpenRun
from titan_tts.speak.sampling_options import choose_run
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts.data.members import caption_of
from torchtitan.models.dit_tts.errors import require
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


def find_systems(options: Options) -> dict[str, OpenRun]:
    """The checkpoint of each system by its short and unique name, NAME@STEP or NAME@STEP:WEIGHTS."""
    texts = () if options.run == NO_RUN else (options.run, *options.more)
    given = [of_system(options, text) for text in texts]
    runs = [choose_run(each) for each in given]
    for text, run in zip(texts, runs, strict=True):
        run.find_weights()
        once = runs.count(run) == 1
        require(once, f"{text}: step {run.step} is given twice; give each system once")
    folders = {Path(each.run).resolve() for each in given}
    short = len({folder.name for folder in folders}) == len(folders)
    # Weights are named where they tell systems apart.
    several = len({run.weights for run in runs}) > 1
    found = {}
    for each, run in zip(given, runs, strict=True):
        name = Path(each.run).resolve().name if short else each.run
        behind = f":{run.weights}" if several and run.weights else ""
        found[f"{name}@{run.step}{behind}"] = run
    return found


def of_system(options: Options, text: str) -> Options:
    """The options of RUN, RUN@STEP or RUN@STEP:WEIGHTS."""
    folder, at, given = text.rpartition("@")
    if not at or Path(text).is_dir():
        return replace(options, run=os.path.normpath(text))
    number, colon, weights = given.partition(":")
    step: Any = int(number) if number.isdecimal() else number
    weights = weights if colon else options.weights
    return replace(options, run=os.path.normpath(folder), step=step, weights=weights)


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
