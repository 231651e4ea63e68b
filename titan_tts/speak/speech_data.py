"""Lengths of texts and references of named speakers: what a model needs to speak in addition to its weights.

A run takes them from its training shards, an exported folder has them in files of its own.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchtitan.models.dit_tts.bounded import read_weights
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.job_config import Data, Encoder, JobConfig
from torchtitan.models.dit_tts.data.dataset import Dataset, open_training_data
from torchtitan.models.dit_tts.errors import reading, require
from torchtitan.models.dit_tts.speech.codec.record import RECORD_NAME
from torchtitan.models.dit_tts.text.durations import (
    LinearDurationModel,
    fit_durations,
    stored_durations,
)
from torchtitan.models.dit_tts.text.vocabulary import named


class TrainingShards:
    """Lengths and voices of training shards. `folder`: of the fit of lengths; None: it is made of these shards."""

    default_voice = ""
    """no particular voice"""

    def __init__(self, data: Data, encoder: Encoder, folder: Path | None):
        self.data, self.encoder, self.folder = data, encoder, folder

    @cached_property
    def dataset(self) -> Dataset:
        return open_training_data(self.data)

    @cached_property
    def durations(self) -> LinearDurationModel:
        if self.folder is not None:
            return stored_durations(self.folder)
        return fit_durations(self.dataset, self.encoder)

    def reference(self, speaker: str) -> Tensor:
        """(R, C) latents of a speaker's longest reference. One that is shorter than [data] max_speaker_frames, as of a list of
        single words, is followed by the speaker's longest recordings: a voice is not heard in a second."""
        dataset, (codes, speakers) = self.dataset, self.dataset.labels("speaker")
        has = named(self.speakers, 20) or "none"
        require(
            speaker in speakers,
            f"--speaker = {speaker}, but the data have no such speaker; they have: {has}",
        )
        samples = np.flatnonzero(codes == speakers.index(speaker))
        given = int(samples[np.argmax(dataset.reference_frames[samples])])
        parts = [dataset.load(given).reference] if dataset.reference_frames[given] else []
        for sample in samples[np.argsort(-dataset.frames[samples], kind="stable")].tolist():
            if sum(map(len, parts)) >= self.data.max_speaker_frames:
                break
            parts.append(dataset.load(sample).latents)
        return torch.from_numpy(np.concatenate(parts))

    @property
    def speakers(self) -> list[str]:
        return sorted(self.dataset.labels("speaker")[1])


class ExportedSpeechData:
    """Lengths and voices that `titan-tts export` wrote."""

    def __init__(self, folder: Path, channels: int):
        self.folder, self.channels = folder, channels

    @cached_property
    def default_voice(self) -> str:
        """The speaker of a request that names none; empty: no particular voice."""
        return exported.read_exported(self.folder).get("voice", "")

    @cached_property
    def durations(self) -> LinearDurationModel:
        return stored_durations(self.folder)

    @cached_property
    def _voices(self) -> dict[str, Tensor]:
        path = self.folder / exported.VOICES
        if not path.is_file():
            return {}
        with reading(path):
            found = read_weights(path)[0]
            for name, voice in found.items():
                shape = tuple(voice.shape)
                if voice.ndim != 2 or not len(voice) or shape[1] != self.channels:
                    raise ValueError(
                        f"the voice {name} is of shape {shape}, not (R, {self.channels})"
                    )
            return found

    def reference(self, speaker: str) -> Tensor:
        """(R, C) latents of a speaker's reference."""
        has = named(self.speakers, 20) or "nobody"
        require(
            speaker in self._voices,
            f"--speaker = {speaker}, but {self.folder} was exported with the voices of: {has}; give a recording by "
            f"--reference, or by --data shards with that speaker",
        )
        return self._voices[speaker]

    @property
    def speakers(self) -> list[str]:
        return sorted(self._voices)


SpeechData = TrainingShards | ExportedSpeechData


def open_speech_data(
    folder: Path, config: JobConfig, data_path: str = "", refit: bool = False
) -> SpeechData:
    """Lengths and voices of a run or an exported folder.

    Args:
        config: the run's.
        data_path: other shards, or the whole output of `prepare`, to take references from.
        refit: whether lengths are fitted to them; else they are the folder's own fit.
    """
    if exported.is_exported(folder) and not data_path:
        return ExportedSpeechData(folder, config.data.latent_channels)
    data = config.data
    if data_path:
        whole = Path(data_path, RECORD_NAME).is_file()
        data = replace(data, path=str(Path(data_path, "train")) if whole else data_path)
    return TrainingShards(data, config.encoder, None if refit else folder)
