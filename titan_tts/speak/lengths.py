"""Estimates how many latent frames an utterance takes: by a trained predictor, or by the fit that a run keeps of its
training data. A model that was trained with [objective] loss_on_padding needs neither: it makes zero latents behind the
speech, where `sampler.speech_end` cuts.

Where the text of the reference is known, its own length corrects the estimate: with the estimate e of the text,
the reference's r frames and the estimate e' of its text, the length is e·(r / e')^w with w = r / (r + k): the deviation
of a short reference is mostly chance. k is 50 for the fit (chosen by trials) and 100 for a
predictor, which has heard the voice. A text by far too long or short for the reference is not its text, and corrects
nothing.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from titan_tts.speak.load_run import LoadedRun, load_run
from titan_tts.speak.open_run import OpenRun, open_run
from titan_tts.speak.utterance import Utterance
from torchtitan.models.dit_tts.config.exported import is_exported
from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig
from torchtitan.models.dit_tts.config.shipped import shipped_path
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.speech.sampling.sampler import (
    SpeechRequest,
    own_frames,
    predict_frames,
)
from torchtitan.models.dit_tts.text.durations import LinearDurationModel
from torchtitan.models.dit_tts.text.vocabulary import language_of

FIT = "fit"
"""Value of --duration other than folders"""

FOLDER = "duration"
"""name of a predictor's folder, in the run's folder or next to it"""

_HALF_TRUSTED_FIT, _HALF_TRUSTED_PREDICTOR = 50, 100
"""k of the correction, see above"""

_MAX_PACE, _MIN_DEVIATION = 2.0, 20
"""factor and frames beyond which a reference is not of its text: one in a hundred right texts of recordings of 1 to 5 s
is, and one in five of other recordings"""

_MAX_FRAMES, _FRAMES_PER_CHARACTER = 4096, 25
"""limit of a text, before --duration-scale. Speech takes less; a fit or a predictor may be a stranger's, or know
nothing of the text, and ask for all memory"""

_BATCH = 64

_ENDS_ITSELF = "but this model decides itself where the speech ends; leave it out"


@dataclass(frozen=True)
class Lengths:
    """Estimates the lengths of utterances in one of these ways."""

    name: str
    """for messages"""

    estimate: Callable[[Sequence[Utterance]], list[float]]
    scale: float = 1.0
    """--duration-scale"""

    half_trusted: float = 0
    """frames of a reference whose deviation from the estimate counts half"""

    known_speakers: Container[str] = ()
    """whose rate the estimate knows better than one reference does"""

    generated: int = 0
    """frames of every utterance, if the model ends the speech itself; estimates then only split long texts"""

    def generate(self, utterances: Sequence[Utterance]) -> list[int]:
        """Latent frames to generate of each utterance, at least 1, at its speed."""
        if not self.generated:
            frames = zip(utterances, self.frames(utterances), strict=True)
            return [max(1, round(estimate / each.speed)) for each, estimate in frames]
        for each in utterances:
            require(each.speed == 1, f"speed = {each.speed:g}, {_ENDS_ITSELF}")
        return [self.generated] * len(utterances)

    def frames(self, utterances: Sequence[Utterance]) -> list[int]:
        """Latent frames that each utterance is estimated to take, at least 1."""
        estimates = self.estimate(utterances)
        known = {
            index: replace(each, text=each.voice.text)
            for index, each in enumerate(utterances)
            if each.voice.text and each.voice.speaker not in self.known_speakers
        }
        of_references = self.estimate(list(known.values()))
        for (index, each), estimate in zip(known.items(), of_references, strict=True):
            real = 0 if each.voice.reference is None else len(each.voice.reference)
            if real and estimate > 0 and _fits(real, estimate):
                estimates[index] *= (real / estimate) ** (real / (real + self.half_trusted))
        for each, frames in zip(utterances, estimates, strict=True):
            limit = _MAX_FRAMES + _FRAMES_PER_CHARACTER * len(each.text)
            if not frames <= limit:
                raise InputError(
                    f"{self.name} gives {frames:.3g} frames to {each.text[:40]!r}, but {len(each.text)} "
                    f"characters may have at most {limit}; give --seconds, or another --duration"
                )
        return [max(1, round(self.scale * frames)) for frames in estimates]


def _fits(real: int, estimate: float) -> bool:
    """True if a reference of so many frames may be of a text that takes about `estimate`."""
    return 1 / _MAX_PACE <= real / estimate <= _MAX_PACE or abs(real - estimate) <= _MIN_DEVIATION


def open_lengths(
    choice: str,
    scale: float,
    run: LoadedRun,
    fit: Callable[[], LinearDurationModel],
    encoder: str = "",
) -> Lengths:
    """The estimator that --duration names.

    Args:
        choice: FIT or a predictor's folder; empty: the predictor in the run's folder or next to it, else FIT.
        fit: returns the fit on the run's training data.
        encoder: present path of the run's frozen text encoder, or the phones:LANGUAGE to read texts in; empty: the config's.
    """
    opened = find_predictor(run.folder, run.config, choice)
    if opened is None:
        durations = fit()
        if (language := language_of(encoder)) not in ("", durations.language):
            # A letter takes about as long in any language.
            durations = replace(durations, language=language, normalize="")
        generated = 0 if choice else own_frames(run.config)

        def estimate(utterances: Sequence[Utterance]) -> list[float]:
            return [durations.estimate(each.text, each.voice.speaker) for each in utterances]

        require(scale == 1 or not generated, f"--duration-scale = {scale:g}, {_ENDS_ITSELF}")
        name = "the model's own end" if generated else "the fit on the training data"
        own = _HALF_TRUSTED_FIT, durations.speaker_scale, generated
        return Lengths(name, estimate, scale, *own)
    predictor = load_predictor(opened, run.config, encoder)
    name, estimate = f"{opened.folder} step {predictor.step}", partial(_predict, predictor)
    return Lengths(name, estimate, scale, _HALF_TRUSTED_PREDICTOR)


def find_predictor(folder: Path, config: JobConfig, choice: str = "") -> OpenRun | None:
    """The predictor that --duration names, none for FIT; empty: in a run's folder, or next to it one that was trained on the
    same data."""
    if choice:
        return None if choice == FIT else open_predictor(choice)
    for candidate in (folder / FOLDER, folder.absolute().parent / FOLDER):
        is_inside = candidate.parent == folder
        try:
            found = open_run(candidate)
        except InputError:
            if is_exported(folder) and is_inside and candidate.is_dir():
                raise  # export writes no other
            continue  # nothing there, or not trained yet
        is_own = is_inside or found.config.data.path == config.data.path
        if found.config.model.flavor == DURATION_FLAVOR and is_own:
            return found
    return None


def open_predictor(folder: str) -> OpenRun:
    """The predictor that --duration names, or that is in the model that it names."""
    place = Path(shipped_path(folder))
    for candidate in filter(Path.is_dir, (place, place / FOLDER)):
        found = open_run(candidate)
        if found.config.model.flavor == DURATION_FLAVOR:
            return found
    raise InputError(
        f"--duration = {folder}, but it must be {FIT}, the folder of a run of [model] flavor = '{DURATION_FLAVOR}', or a "
        "model that has one (a length in seconds is --seconds)"
    )


def load_predictor(predictor: OpenRun, config: JobConfig, encoder: str = "") -> LoadedRun:
    """Loads a duration predictor of the latents of `config`, of the run that speaks. `encoder`: present path of that run's
    frozen text encoder, which the predictor may share."""
    own = predictor.config
    for key in ("latent_channels", "frames_per_second"):
        wanted, had = getattr(config.data, key), getattr(own.data, key)
        require(
            wanted == had,
            f"--duration = {predictor.folder}, but that was trained with [data] {key} = {had} and the run with "
            f"{wanted}; train a predictor on the run's data",
        )
    same = own.encoder.model == config.encoder.model
    return load_run(predictor, encoder=encoder if same else "")


def _predict(predictor: LoadedRun, utterances: Sequence[Utterance]) -> list[float]:
    data, frames = predictor.config.data, list[float]()
    model = cast(DurationModel, predictor.model)
    for first in range(0, len(utterances), _BATCH):
        requests = [
            SpeechRequest(each.text, each.voice.latents(data), metadata=each.conditions)
            for each in utterances[first : first + _BATCH]
        ]
        frames += predict_frames(
            model, predictor.tokenizer, requests, predictor.device, predictor.text_encoder
        )
    return frames
