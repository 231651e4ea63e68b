"""Every system synthesizes every prompt; the speech is written and scored, as are recordings and codec."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torchtitan.tools.utils import device_type
from tqdm import tqdm

from titan_tts.evaluate.options import NO_RUN, Options
from titan_tts.evaluate.prompts import Prompt, PromptSet, encode_prompts
from titan_tts.evaluate.report import CODEC, RECORDINGS, SYSTEM, Row
from titan_tts.speak.load_run import LoadedRun
from titan_tts.speak.open_run import OpenRun
from titan_tts.speak.sampling_options import choose_run, load_synthesizer
from titan_tts.speak.speech_data import reference_settings
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Utterance, Voice, join
from torchtitan.models.dit_tts.config.exported import is_exported
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.data.dataset import open_training_data
from torchtitan.models.dit_tts.data.members import caption_of
from torchtitan.models.dit_tts.errors import InputError, require, show
from torchtitan.models.dit_tts.files import file_name, is_remote, unique
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.codec.record import check_codec
from torchtitan.models.dit_tts.speech.sampling.sound_files import write_sound
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.scores import (
    Scorers,
    UtteranceScore,
    hear,
    score,
)
from torchtitan.models.dit_tts.text.vocabulary import named

_SHOWN = 5
_HEARD_AT_ONCE = 8  # sounds, by a recognizer that can


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


def is_training_data(source: str, tests: PromptSet, run: OpenRun) -> bool | None:
    """True if a run was trained on latents of the test set, or on its path where it has none yet. None if the run's data
    are not known here: an exported folder does not name them, others are away, remote or damaged."""
    data = run.config.data
    paths = [data.path] if isinstance(data.path, str) else data.path
    if is_exported(run.folder):
        return None
    if tests.latents_hash is None:
        return Path(source).resolve() in {Path(path).resolve() for path in paths if path}
    if any(map(is_remote, paths)):  # one without an index would be read in full
        return None
    try:
        return bool(np.isin(tests.latents_hash, open_training_data(data).latents_hash).any())
    except InputError:
        return None


@dataclass
class Evaluation:
    """One evaluation: `rows` does the work."""

    options: Options
    folder: Path
    """output folder"""

    systems: dict[str, OpenRun]
    """checkpoints by name"""

    tests: PromptSet
    scorers: Scorers
    codec: Codec = field(init=False)
    """the codec of all systems"""

    scored: list[Row] = field(default_factory=list, init=False)
    """the rows so far"""

    def rows(self) -> Iterator[list[Row]]:
        """Recordings (where there are any), codec and the systems so far, after each system; once if there is no system."""
        if not self.systems:
            self._begin(build_codec(self.options.codec or Sampling().codec, device_type), "")
            self.scored += self._rows_without_system()
            yield self.scored
        for name, run in self.systems.items():
            self.scored += self._rows_of(name, run)
            yield self.scored

    def _rows_of(self, name: str, run: OpenRun) -> list[Row]:
        """Scores one system, whose model is freed before the next one loads. The first system has the rows that
        need no system with it."""
        synthesizer = load_synthesizer(self.options, run, refit=bool(self.options.data))
        rows, first = list[Row](), next(iter(self.systems))
        if name == first:
            self._begin(synthesizer.codec, synthesizer.data_path)
            rows += self._rows_without_system()
        elif synthesizer.codec.fingerprint != self.codec.fingerprint:
            raise InputError(f"{name} has another codec than {first}; evaluate them separately")
        for found in untrained_tokens(synthesizer.run, self.tests.prompts):
            show(f"warning: {self.options.test} has {found}, given as unknown", sys.stderr)
        return [*rows, self._row(name, synthesizer)]

    def _begin(self, codec: Codec, data_path: str | Sequence[str]) -> None:
        """Sets the codec and the prompts' latents; recordings are processed as the data at `data_path`."""
        self.codec = codec
        check_codec(codec, self.options.test)
        encode_prompts(self.tests, codec, reference_settings(data_path))

    def _rows_without_system(self) -> list[Row]:
        """Recordings and codec, each if every prompt has one."""
        rows = []
        for name in (RECORDINGS, CODEC):
            loads = [prompt.loads(self.codec).get(name) for prompt in self.tests.prompts]
            if all(loads):
                sounds = ((index, load()) for index, load in enumerate(loads) if load)
                rows.append(Row(name, name, [None], [self._score(sounds, name)]))
        return rows

    def _row(self, name: str, synthesizer: Synthesizer) -> Row:
        prompts, batch_size = self.tests.prompts, self.options.batch_size

        def spoken(seed: int) -> Iterable[tuple[int, Sound]]:
            for index, sound in speak(synthesizer, prompts, seed, batch_size):
                write_sound(self.wav(name, seed, prompts[index]), sound.waveform, sound.sample_rate)
                yield index, sound

        run = synthesizer.run
        seeds = [self.options.seed + number for number in range(self.options.seeds)]
        scores = [self._score(spoken(seed), f"{name}, seed {seed}") for seed in seeds]
        seconds = sum(each.seconds for of_seed in scores for each in of_seed)
        details = {
            "run": str(run.folder),
            "step": run.step,
            "weights": run.weights,
            "sampling": asdict(synthesizer.sampling),
            "lengths": synthesizer.lengths.name,
            "batch_size": batch_size,
            "sampling_seconds": synthesizer.seconds_spent,
            "real_time_factor": synthesizer.seconds_spent / seconds,
        }
        return Row(name, SYSTEM, list(seeds), scores, details)

    def wav(self, name: str, seed: int | None, prompt: Prompt) -> Path:
        """The file of a system's speech."""
        return wav_path(self.folder, [*self.systems], name, seed, prompt.file_name)

    def _score(self, sounds: Iterable[tuple[int, Sound]], label: str) -> list[UtteranceScore]:
        """Scores of (index of its prompt, sound) in any order, in the order of the prompts."""
        prompts, scores, left = self.tests.prompts, dict[int, UtteranceScore](), iter(sounds)
        with tqdm(desc=label, total=len(prompts), unit="utterance", mininterval=1.0) as progress:
            while some := list(islice(left, _HEARD_AT_ONCE)):
                words = self._hear(some)
                for index, sound in some:
                    prompt, reference = prompts[index], None
                    if self.scorers.speaker is not None and prompt.load_reference is not None:
                        reference = prompt.load_reference()
                    said = prompt.text, self.scorers, reference, prompt.language
                    scores[index] = score(sound, *said, words.get(index))
                    progress.update()
        return [scores[index] for index in range(len(prompts))]

    def _hear(self, sounds: Sequence[tuple[int, Sound]]) -> dict[int, str]:
        """Words in each of (index of its prompt, sound), language by language; of none without a recognizer."""
        words: dict[int, str] = {}
        if self.scorers.recognizer is None:
            return words
        for language in {self.tests.prompts[index].language for index, _ in sounds}:
            these = {i: each for i, each in sounds if self.tests.prompts[i].language == language}
            found = hear(self.scorers.recognizer, list(these.values()), language)
            words |= {index: text for index, (text, *_) in zip(these, found, strict=True)}
        return words


def output_folder(options: Options, systems: dict[str, OpenRun]) -> Path:
    """--out, or RUN/evaluation/step-N-TEST, with chosen weights step-N-WEIGHTS-TEST; of several systems
    evaluation-TEST-SYSTEMS next to the first run."""
    if options.out:
        return Path(options.out)
    test, first = "-".join(Path(options.test).absolute().parts[-2:]), next(iter(systems.values()))
    given = Path(of_system(options, options.run).run)
    if len(systems) > 1:
        return given.absolute().parent / file_name(f"evaluation-{test}-{'-'.join(systems)}")
    parts = [f"step-{first.step}", *([first.weights] if first.weights else []), test]
    # A model of the hub or the package has no folder of its own here.
    folder = given if first.folder == given else file_name(given.name)
    return Path(folder, "evaluation", file_name("-".join(parts)))
