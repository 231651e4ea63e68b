"""A recording of a speaker to the latents that a model takes as its reference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.models.dit_tts.codec import Codec
from torchtitan.models.dit_tts.codec.record import recorded_codecs
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.audio import decode
from torchtitan.models.dit_tts.prepare.processing import REASONS, SILENCE_LUFS, process
from torchtitan.models.dit_tts.prepare.settings import AudioSettings

# Less than a syllable, which tells nothing of a voice.
MIN_SECONDS = 0.2


def reference_settings(data_path: str | Sequence[str]) -> AudioSettings:
    """Loudness and silence as the training data's references had them.

    Data without a record: as `titan-tts prepare` has them by default. Data that were prepared in
    several ways: as the first were; the model was trained on all of them.

    Args:
        data_path: as [data] path.
    """
    audio = next((record.audio for record in recorded_codecs(data_path)), {})
    # The filters change no recording; they are not for one that the user chose.
    steps = {name: audio[name] for name in ("loudness", "max_silence") if name in audio}
    return replace(AudioSettings(), **steps)


def encode_reference(
    path: str | Path, codec: Codec, settings: AudioSettings, max_frames: int
) -> Tensor:
    """Latents (at most max_frames, channels) of a recording of any format, rate and channels.

    The recording goes the way of the training data's references: one channel, the codec's rate,
    silence at its ends capped, the loudness brought to a level.

    Args:
        settings: as `reference_settings` makes them.

    Raises:
        InputError: no readable audio, or too little of it.
    """
    loudness = settings.loudness
    if loudness is not None and not SILENCE_LUFS < loudness <= 0:
        raise InputError(
            f"--reference-loudness is {loudness}; it must be above {SILENCE_LUFS:g} and at most 0 LUFS, "
            "or off"
        )
    try:
        samples, rate = decode(str(path))
    except InputError as error:
        raise InputError(f"--reference {path}: {error}; give a recording of the speaker") from None
    found = process(samples, rate, codec.sample_rate, "", settings)
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
