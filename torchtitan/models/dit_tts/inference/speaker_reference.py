"""A recording of a speaker to the latents that a model takes as its reference."""

from pathlib import Path

import torch
from torch import Tensor

from torchtitan.models.dit_tts.codec import Codec
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.audio import decode
from torchtitan.models.dit_tts.prepare.processing import REASONS, SILENCE_LUFS, process
from torchtitan.models.dit_tts.prepare.settings import AudioSettings

# Less than a syllable, which tells nothing of a voice.
MIN_SECONDS = 0.2


def encode_reference(
    path: str | Path, codec: Codec, loudness: float | None, max_frames: int
) -> Tensor:
    """Latents (at most max_frames, channels) of a recording of any format, rate and channels.

    The recording goes the way of the training data's references: one channel, the codec's rate,
    silence at its ends capped, the loudness brought to a level.

    Args:
        loudness: LUFS, as `titan-tts prepare --loudness` had it; None leaves the level alone.

    Raises:
        InputError: no readable audio, or too little of it.
    """
    if loudness is not None and not SILENCE_LUFS < loudness <= 0:
        raise InputError(
            f"--reference-loudness is {loudness}; it must be above {SILENCE_LUFS:g} and at most 0 LUFS, "
            "or off"
        )
    try:
        samples, rate = decode(str(path))
    except InputError as error:
        raise InputError(
            f"--reference {path}: {error}; give a recording of the speaker"
        ) from None
    found = process(samples, rate, codec.sample_rate, "", AudioSettings(loudness=loudness))
    if isinstance(found, str):
        raise InputError(
            f"--reference {path}: the recording is {REASONS[found]}; give one of the speaker's speech"
        )
    if found.seconds < MIN_SECONDS:
        raise InputError(
            f"--reference {path}: has {found.seconds:.3f} s beside silence; give at least {MIN_SECONDS} s "
            "of speech, better 5 to 15 s"
        )
    # What lies behind is not needed: a long recording would take long for nothing.
    return codec.encode(torch.from_numpy(found.waveform)[: max_frames * codec.hop_length])
