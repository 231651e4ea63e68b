"""How long utterances are to be, in latent frames: by a trained predictor, by the fit that a run keeps of its
training data, or by the rate of the reference.

Where it is known what the reference says, its own length corrects the estimate: with it e, the reference's
frames r and the estimate e' of these, the length is e·(r / e')^w. The rate rule is that with the bytes of the
text as the estimate and w = 1: as many frames per byte as the reference has. An estimate that knows more of
the text takes w = r / (r + 100): what a short reference is off by is mostly its own.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from titan_tts.speak.load_run import LoadedRun, find_checkpoint, load_run
from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.speech.sampling.predicted_frames import predict_frames
from torchtitan.models.dit_tts.speech.sampling.sampler import SpeechRequest
from torchtitan.models.dit_tts.text.durations import LinearDurationModel

FIT, RATE = "fit", "rate"
"""Values of --duration beside folders"""

FOLDER = "duration"
"""where a predictor is looked for: in the run's folder, and beside it"""

_HALF_TRUSTED = 100
"""frames of a reference whose deviation from the estimate is taken half"""

_MAX_FRAMES, _FRAMES_PER_CHARACTER = 4096, 25
"""of a text, before --duration-scale. Speech takes less; a fit or a predictor may be a stranger's, or know
nothing of the text, and ask for all memory"""

_BATCH = 64


@dataclass(frozen=True)
class TimedText:
    """A text whose length is asked for."""

    text: str
    reference: Tensor
    """(R, C) latents of the speaker, all of them; (0, C) for no particular one"""

    speaker: str = ""
    """a name of the training data"""

    reference_text: str = ""
    """what the reference says; empty: not known"""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """values of the conditioning tokens, under the names that a sample's JSON has"""


Estimate = Callable[[Sequence[TimedText]], list[float]]


@dataclass(frozen=True)
class Lengths:
    """The lengths of texts by one of these ways."""

    name: str
    """for messages"""

    estimate: Estimate
    scale: float = 1.0
    """--duration-scale"""

    is_rate: bool = False
    """whether the rate of the reference decides"""

    known_speakers: Container[str] = ()
    """whose rate the estimate knows better than by one reference"""

    def frames(self, texts: Sequence[TimedText]) -> list[int]:
        """Latent frames of each, at least 1.

        Raises:
            InputError: the rate rule for a reference of which it is not known what it says, or a length that
                no speech has.
        """
        if self.is_rate and not all(each.reference_text for each in texts):
            raise InputError(
                "--duration = rate, but it is not known what the reference says; give --reference-text, or "
                "leave --duration out"
            )
        found = self.estimate(texts)
        known = [
            place
            for place, each in enumerate(texts)
            if each.reference_text and each.speaker not in self.known_speakers
        ]
        of_references = self.estimate(
            [replace(texts[place], text=texts[place].reference_text) for place in known]
        )
        for place, estimated in zip(known, of_references, strict=True):
            real = len(texts[place].reference)
            weight = 1.0 if self.is_rate else real / (real + _HALF_TRUSTED)
            if real and estimated > 0:
                found[place] *= (real / estimated) ** weight
        for each, frames in zip(texts, found, strict=True):
            limit = _MAX_FRAMES + _FRAMES_PER_CHARACTER * len(each.text)
            if not frames <= limit:
                raise InputError(
                    f"{self.name} gives {frames:.3g} frames to {each.text[:40]!r}, but {len(each.text)} "
                    f"characters may have at most {limit}; give --seconds, or another --duration"
                )
        return [max(1, round(self.scale * frames)) for frames in found]


def open_lengths(
    choice: str,
    scale: float,
    run: LoadedRun,
    fit: Callable[[], LinearDurationModel],
    encoder: str = "",
) -> Lengths:
    """The way of --duration.

    Args:
        choice: FIT, RATE or a predictor's folder; empty: the predictor in the run's folder or beside it, else
            FIT.
        scale: factor of every length.
        run: that is to speak.
        fit: the run's.
        encoder: where the run's frozen text encoder is now; empty: where it was.

    Raises:
        InputError: no such predictor, or one of other latents.
    """
    if choice == RATE:
        return Lengths("the reference's rate", _bytes, scale, is_rate=True)
    folder = Path(choice) if choice else find_predictor(run.folder, run.config)
    if choice == FIT or folder is None:
        durations = fit()
        name, known = "the fit on the training data", durations.speaker_scale
        return Lengths(name, partial(_fitted, durations), scale, known_speakers=known)
    predictor = load_predictor(folder, run.config, encoder)
    return Lengths(f"{folder} step {predictor.step}", partial(_predicted, predictor), scale)


def find_predictor(folder: Path, config: JobConfig) -> Path | None:
    """The predictor in a run's folder, or beside it one that was trained on the same data; None without.

    Args:
        config: the run's.
    """
    for candidate in (folder / FOLDER, folder.absolute().parent / FOLDER):
        try:
            found = load_run_config(candidate)
            find_checkpoint(candidate, found, None)
        except InputError:
            continue  # nothing there, or not trained yet
        is_own = candidate.parent == folder or found.data.path == config.data.path
        if found.model.flavor == DURATION_FLAVOR and is_own:
            return candidate
    return None


def load_predictor(folder: Path, config: JobConfig, encoder: str = "") -> LoadedRun:
    """A duration predictor.

    Args:
        config: of the run that is to speak, whose latents must be the predictor's.
        encoder: where that run's frozen text encoder is now, which may be the predictor's, too.

    Raises:
        InputError: there is none, or its latents are others.
    """
    if not folder.is_dir():
        raise InputError(
            f"--duration = {folder}, but it must be {FIT}, {RATE} or the folder of a run of [model] flavor = "
            f"'{DURATION_FLAVOR}' (a length in seconds is --seconds)"
        )
    own = load_run_config(folder)
    if own.model.flavor != DURATION_FLAVOR:
        raise InputError(
            f"--duration = {folder}, but that was trained with [model] flavor = {own.model.flavor!r}; give a "
            f"run of '{DURATION_FLAVOR}'"
        )
    for key in ("latent_channels", "frames_per_second"):
        wanted, had = getattr(config.data, key), getattr(own.data, key)
        if wanted != had:
            raise InputError(
                f"--duration = {folder}, but that was trained with [data] {key} = {had} and the run with "
                f"{wanted}; train a predictor on the run's data"
            )
    same = own.encoder.model == config.encoder.model
    return load_run(folder, encoder=encoder if same else "")


def _bytes(texts: Sequence[TimedText]) -> list[float]:
    return [float(len(each.text.encode("utf-8", "replace"))) for each in texts]


def _fitted(durations: LinearDurationModel, texts: Sequence[TimedText]) -> list[float]:
    return [durations.estimate(each.text, each.speaker) for each in texts]


def _predicted(predictor: LoadedRun, texts: Sequence[TimedText]) -> list[float]:
    limit, found = predictor.config.data.max_speaker_frames, []
    model = cast(DurationModel, predictor.model)
    for first in range(0, len(texts), _BATCH):
        requests = [
            SpeechRequest(each.text, each.reference[:limit], metadata=each.metadata)
            for each in texts[first : first + _BATCH]
        ]
        found += predict_frames(
            model, predictor.tokenizer, requests, predictor.device, predictor.text_encoder
        )
    return found
