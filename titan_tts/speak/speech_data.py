"""What a model speaks with beside its weights: how long texts take, and the references of named speakers.

A run has them from its training shards, an exported folder in files of its own.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from torch import Tensor

from titan_tts.speak.speaker_reference import reference_of_speaker
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.build import open_training_data
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.codec.record import RECORD_NAME
from torchtitan.models.dit_tts.text.durations import (
    FILE_NAME,
    LinearDurationModel,
    fit_durations,
    stored_durations,
)
from torchtitan.models.dit_tts.text.vocabulary import named


class SpeechData(Protocol):
    """Of one model."""

    @property
    def durations(self) -> LinearDurationModel:
        """How long texts take.

        Raises:
            InputError: there is nothing to tell it by.
        """
        ...

    def reference(self, speaker: str) -> Tensor:
        """(R, C) latents of a speaker's reference.

        Raises:
            InputError: no such speaker.
        """
        ...

    @property
    def speakers(self) -> list[str]:
        """Those with a reference, sorted."""
        ...


def open_speech_data(
    folder: Path, data: Data, data_path: str = "", refit: bool = False
) -> SpeechData:
    """Of a run or an exported folder.

    Args:
        data: the section of the run's config.
        data_path: other shards, or all of prepare's output, to take references from.
        refit: whether lengths are fitted to them; else they are those that the folder keeps, if it does.
    """
    if exported.is_exported(folder) and not data_path:
        return ExportedSpeechData(folder)
    if data_path:
        whole = Path(data_path, RECORD_NAME).is_file()
        data = replace(data, path=str(Path(data_path, "train")) if whole else data_path)
    return TrainingShards(data, None if refit else folder)


class TrainingShards:
    """A speaker's reference is among theirs.

    Args:
        folder: that keeps the fit of lengths; None, or one that keeps none: it is made of these shards.
    """

    def __init__(self, data: Data, folder: Path | None):
        self.data, self.folder = data, folder

    @cached_property
    def dataset(self) -> Dataset:
        return open_training_data(self.data)

    @cached_property
    def durations(self) -> LinearDurationModel:
        stored = None if self.folder is None else stored_durations(self.folder)
        if stored is not None:
            return stored
        try:
            return fit_durations(self.dataset)
        except InputError as error:
            raise InputError(
                f"{error} (the lengths of texts are estimated from the training shards; say by --data where "
                "they are now)"
            ) from None

    def reference(self, speaker: str) -> Tensor:
        return reference_of_speaker(self.dataset, speaker)

    @property
    def speakers(self) -> list[str]:
        return sorted(self.dataset.labels("speaker")[1])


class ExportedSpeechData:
    """As `titan-tts export` wrote them."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def durations(self) -> LinearDurationModel:
        found = stored_durations(self.folder)
        if found is None:
            raise InputError(f"{self.folder} has no {FILE_NAME}; export the run again")
        return found

    @cached_property
    def voices(self) -> dict[str, Tensor]:
        """Speaker -> (R, C)."""
        path = self.folder / exported.VOICES
        if not path.is_file():
            return {}
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read ({error}); copy it again") from None

    def reference(self, speaker: str) -> Tensor:
        if speaker not in self.voices:
            raise InputError(
                f"--speaker = {speaker}, but {self.folder} was exported with the voices of: "
                f"{named(self.speakers, 20) or 'nobody'}; give a recording by --reference, or by --data shards "
                f"with that speaker"
            )
        return self.voices[speaker]

    @property
    def speakers(self) -> list[str]:
        return sorted(self.voices)


def save_voices(references: dict[str, Tensor], path: Path) -> None:
    """Writes the references (R, C) of speakers."""
    from safetensors.torch import save

    tensors = {name: each.float().contiguous() for name, each in references.items()}
    write_atomic(path, save(tensors))
