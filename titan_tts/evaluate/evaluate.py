"""Every prompt said by every system, decoded, written and scored; recordings and codec beside."""

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from titan_tts.evaluate.options import Options
from titan_tts.evaluate.prompts import (
    Prompt,
    PromptSet,
    decoded,
    encode_prompts,
)
from titan_tts.evaluate.report import (
    CODEC,
    RECORDINGS,
    SYSTEM,
    UNTRAINED,
    Row,
)
from titan_tts.evaluate.systems import (
    Place,
    System,
    own_voice,
    untrained_tokens,
)
from titan_tts.speak.hub import find_folder
from titan_tts.speak.load_run import untrained_model
from titan_tts.speak.sampling_options import load_synthesizer
from titan_tts.speak.speaker_reference import reference_settings
from titan_tts.speak.synthesizer import Synthesizer
from torchtitan.models.dit_tts.errors import InputError, show
from torchtitan.models.dit_tts.files import file_name, unique
from torchtitan.models.dit_tts.speech.codec import Codec
from torchtitan.models.dit_tts.speech.codec.record import check_codec
from torchtitan.models.dit_tts.speech.sampling.sound_files import write_sound
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_speaker_scorer
from torchtitan.models.dit_tts.speech.scoring.scores import Scorers, UtteranceScore, score
from torchtitan.models.dit_tts.text.durations import LinearDurationModel
from torchtitan.models.dit_tts.text.vocabulary import named


@dataclass
class Evaluation:
    """One evaluation as it runs: `rows` does the work."""

    options: Options
    folder: Path
    """that it is written to"""

    places: list[Place]
    tests: PromptSet
    scorers: Scorers
    own_voice: bool
    """compare voices by the first run's own speaker encoder"""

    codec: Codec = field(init=False)
    """of all the systems"""

    scored: list[Row] = field(default_factory=list, init=False)
    """the rows, once they are scored"""

    def rows(self) -> list[Row]:
        """Recordings (where there are any), codec, systems, and the untrained model.

        Raises:
            InputError: a run or audio that cannot be loaded, or another codec than the first run's.
        """
        found = [row for place in self.places for row in self._rows_of(place)]
        # The untrained model, which is the first run's, comes last.
        self.scored = sorted(found, key=lambda row: row.kind == UNTRAINED)
        return self.scored

    def _rows_of(self, place: Place) -> list[Row]:
        """Those of a system, whose model is let go before the next is loaded; with the first system's also
        those beside."""
        synthesizer = load_synthesizer(
            replace(self.options, run=place.folder, step=place.step, weights=place.weights),
            refit=bool(self.options.data),
            on_fit=lambda durations: warn_of_unseen_characters(durations, self.tests),
        )
        rows, is_first, loaded = [], place == self.places[0], synthesizer.run
        if is_first:
            self._begin(synthesizer)
            rows += self._rows_beside()
        elif synthesizer.codec.fingerprint != self.codec.fingerprint:
            raise InputError(
                f"{place.name} has another codec than {self.places[0].name}; evaluate them apart"
            )
        for found in untrained_tokens(loaded, self.tests.prompts):
            show(f"warning: {self.options.test} has {found}, given as unknown", sys.stderr)
        size = self.options.batch_size
        if self.options.untrained and is_first:
            before_training = replace(loaded, model=untrained_model(loaded))
            system = System(UNTRAINED, replace(synthesizer, run=before_training), size)
            rows.append(self._row(system, UNTRAINED, 1))
        system = System(place.name, synthesizer, size)
        return [*rows, self._row(system, SYSTEM, self.options.seeds)]

    def _begin(self, synthesizer: Synthesizer) -> None:
        """The prompts' latents and the scorer of voices: they need the first run."""
        self.codec = synthesizer.codec
        check_codec(self.codec, self.options.test)
        encode_prompts(self.tests, self.codec, reference_settings(synthesizer.data_path))
        if self.own_voice:
            scorer = open_speaker_scorer("own", own=own_voice(synthesizer.run))
            scorer.name = f"the own speaker encoder of {self.places[0].name}, not independent"
            self.scorers = replace(self.scorers, speaker=scorer)

    def _rows_beside(self) -> list[Row]:
        """Of the recordings and of the codec, as far as every prompt has one."""
        prompts, rows = self.tests.prompts, []
        if all(prompt.load_recording is not None for prompt in prompts):
            sounds = (
                (place, replace(prompt.load_recording(), latents=prompt.latents))
                for place, prompt in enumerate(prompts)
                if prompt.load_recording is not None
            )
            rows.append(Row(RECORDINGS, RECORDINGS, [None], [self._score(sounds, RECORDINGS)]))
        if all(prompt.latents is not None for prompt in prompts):
            sounds = (
                (place, self._through_codec(prompt.latents))
                for place, prompt in enumerate(prompts)
                if prompt.latents is not None
            )
            rows.append(Row(CODEC, CODEC, [None], [self._score(sounds, CODEC)]))
        return rows

    def _through_codec(self, latents: Tensor) -> Sound:
        """The decoded sound. The model's own encoder compares latents: those of the sound."""
        sound = decoded(self.codec, latents)
        return (
            replace(sound, latents=self.codec.encode(sound.waveform)) if self.own_voice else sound
        )

    def _row(self, system: System, kind: str, seeds: int) -> Row:
        synthesizer, scores = system.synthesizer, []
        run = synthesizer.run
        numbers = [self.options.seed + number for number in range(seeds)]
        for seed in numbers:

            def spoken(seed: int = seed) -> Iterable[tuple[int, Sound]]:
                for place, sound in system.speak(self.tests.prompts, seed):
                    path = self.wav(system.name, seed, self.tests.prompts[place])
                    write_sound(path, sound.waveform, sound.sample_rate)
                    yield place, sound

            label = f"{system.name}, seed {seed}"
            scores.append(self._score(spoken(), label))
        details = {
            "run": str(run.folder),
            "step": run.step,
            "weights": run.weights,
            "sampling": asdict(synthesizer.sampling),
            "lengths": synthesizer.lengths.name,
            "batch_size": system.batch_size,
            "sampling_seconds": system.wall_seconds,
            "real_time_factor": system.wall_seconds / system.audio_seconds,
        }
        return Row(system.name, kind, list(numbers), scores, details)

    def wav(self, name: str, seed: int | None, prompt: Prompt) -> Path:
        """Where a system's speech lies."""
        names = [*(place.name for place in self.places), UNTRAINED]
        folder = unique([file_name(each) for each in names], str.lower)[names.index(name)]
        return self.folder / "wavs" / folder / f"seed-{seed}" / f"{prompt.file_name}.wav"

    def _score(self, sounds: Iterable[tuple[int, Sound]], label: str) -> list[UtteranceScore]:
        """Scores in the order of the prompts, of (place, sound) in any."""
        prompts = self.tests.prompts
        found: dict[int, UtteranceScore] = {}
        for place, sound in tqdm(sounds, label, len(prompts), unit="utterance", mininterval=1.0):
            prompt = prompts[place]
            reference = None
            if self.scorers.speaker is not None and prompt.load_reference is not None:
                reference = replace(prompt.load_reference(), latents=prompt.reference)
            found[place] = score(sound, prompt.text, self.scorers, reference, prompt.language)
        return [found[place] for place in range(len(prompts))]


def output_folder(options: Options, places: list[Place]) -> Path:
    """--out, or RUN/evaluation/step-N-TEST, with chosen weights step-N-WEIGHTS-TEST; of several systems
    evaluation-TEST-SYSTEMS beside the first run."""
    if options.out:
        return Path(options.out)
    test, first = "-".join(Path(options.test).absolute().parts[-2:]), places[0]
    if len(places) > 1:
        names = "-".join(place.name for place in places)
        return Path(first.folder).absolute().parent / file_name(f"evaluation-{test}-{names}")
    parts = [f"step-{first.step}", *([first.weights] if first.weights else []), test]
    # One of the hub has no folder of its own here.
    here = find_folder(first.folder) == Path(first.folder)
    folder = first.folder if here else Path(first.folder).name
    return Path(folder, "evaluation", file_name("-".join(parts)))


def warn_of_unseen_characters(durations: LinearDurationModel, tests: PromptSet) -> None:
    """Says what the estimated lengths of the texts do not count."""
    if unseen := sorted({c for prompt in tests.prompts for c in durations.unseen(prompt.text)}):
        show(
            f"warning: the texts have {len(unseen)} characters that no training text has "
            f"({named(unseen, 5)}); they count for nothing in the estimated lengths",
            sys.stderr,
        )
