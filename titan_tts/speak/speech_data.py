"""Lengths of texts and references of named speakers: what a model needs to speak in addition to its weights.

A run takes them from its training shards, an exported folder has them in files of its own; a reference may also be a
recording or an array file.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_tts.prepare.processing import REASONS, process
from titan_tts.prepare.settings import AudioSettings
from torchtitan.models.dit_tts.bounded import parse_array, read_bytes, read_weights
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.job_config import Data, Encoder, JobConfig
from torchtitan.models.dit_tts.data.dataset import Dataset, open_training_data
from torchtitan.models.dit_tts.errors import InputError, reading, require
from torchtitan.models.dit_tts.speech.audio import TooLong, decode
from torchtitan.models.dit_tts.speech.codec import Codec
from torchtitan.models.dit_tts.speech.codec.record import RECORD_NAME, recorded_codecs
from torchtitan.models.dit_tts.text.durations import (
    LinearDurationModel,
    fit_durations,
    stored_durations,
)
from torchtitan.models.dit_tts.text.vocabulary import named

# Less is not even a syllable.
MIN_SECONDS = 0.2


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


def reference_settings(data_path: str | Sequence[str]) -> AudioSettings:
    """Loudness and silence of the training data's references. `data_path`: as [data] path; data without a
    prepare.json get the defaults of `titan-tts prepare`, data prepared in several ways the first of these."""
    audio = next((record.audio for record in recorded_codecs(data_path)), {})
    # Only what changes a recording: prepare's filters are not for one that the user chose.
    steps = {name: audio[name] for name in ("loudness", "max_silence") if name in audio}
    return replace(AudioSettings(), **steps)


def encode_reference(
    path: str | Path, codec: Codec, settings: AudioSettings, max_frames: int
) -> Tensor:
    """Latents (at most max_frames, channels) of a recording of any format, rate and channels, which goes the way of the
    training data's references: one channel, the codec's rate, silence at its ends capped, brought to a loudness. The
    loudness is that of the frames which the model takes, as for Irodori-TTS. Of one that is too long to be read the
    beginning is."""
    try:
        try:
            samples, rate = decode(str(path))
        except TooLong as long:
            samples, rate = decode(str(path), seconds=long.seconds)
    except InputError as error:
        raise InputError(f"--reference {path}: {error}; give a recording of the speaker") from None
    longest = max_frames * codec.hop_length
    found = process(samples, rate, codec.sample_rate, "", settings, longest)
    if isinstance(found, str):
        reason = f"the recording is {REASONS[found]}; give one of the speaker's speech"
        raise InputError(f"--reference {path}: {reason}")
    require(
        found.seconds >= MIN_SECONDS,
        f"--reference {path}: has {found.seconds:.3f} s of sound; give 5 to 15 s of speech, or {MIN_SECONDS} s at least",
    )
    return codec.encode(torch.from_numpy(found.waveform))


def load_latents(path: str | Path, channels: int) -> Tensor:
    """(R, channels) float32 latents of a .npy file, such as a shard has."""
    with reading(f"--reference {path}:", "give latents as numpy.save writes them"):
        found = parse_array(read_bytes(path))
    if found.ndim != 2 or found.shape[1] != channels or not len(found) or found.dtype.kind != "f":
        given = f"is an array of {found.dtype} {found.shape}"
        raise InputError(
            f"--reference {path}: {given}, but latents (frames, {channels}) are needed"
        )
    require(bool(np.isfinite(found).all()), f"--reference {path}: has values that are not finite")
    return torch.from_numpy(found.astype(np.float32))
