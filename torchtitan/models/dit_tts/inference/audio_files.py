"""Waveforms on disk."""

import io
from pathlib import Path

import torch

from torchtitan.models.dit_tts.run_folder import write_atomic


def write_wav(path: str | Path, waveform: torch.Tensor, sample_rate: int) -> None:
    """Writes (samples,) float in [-1, 1] as 16-bit PCM, replacing the file at once."""
    import soundfile

    buffer = io.BytesIO()
    samples = waveform.detach().cpu().clamp(-1.0, 1.0).numpy()
    soundfile.write(buffer, samples, sample_rate, format="WAV", subtype="PCM_16")
    write_atomic(Path(path), buffer.getvalue())


def read_audio(path: str | Path, sample_rate: int) -> torch.Tensor:
    """(samples,) float32 of the first channel.

    Raises:
        InputError: a file that cannot be read or has another sample rate.
    """
    import soundfile

    from torchtitan.models.dit_tts.errors import InputError

    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise InputError(f"cannot read audio from {path}: {error}") from error
    if rate != sample_rate:
        raise InputError(
            f"{path} has {rate} Hz; the codec takes {sample_rate} Hz: resample it, for example "
            f"with: sox {path} -r {sample_rate} out.wav"
        )
    return torch.from_numpy(samples[:, 0].copy())
