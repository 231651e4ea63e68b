"""Reference latents from a recording or an array file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_tts.prepare.processing import REASONS, process
from titan_tts.prepare.settings import AudioSettings
from torchtitan.models.dit_tts.bounded import parse_array, read_bytes
from torchtitan.models.dit_tts.errors import InputError, reading, require
from torchtitan.models.dit_tts.speech.audio import decode
from torchtitan.models.dit_tts.speech.codec import Codec
from torchtitan.models.dit_tts.speech.codec.record import recorded_codecs

# Less is not even a syllable.
MIN_SECONDS = 0.2


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
    loudness is that of the frames which the model takes, as for Irodori-TTS."""
    try:
        samples, rate = decode(str(path))
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
