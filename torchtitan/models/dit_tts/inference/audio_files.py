"""Waveforms on disk."""

import io
from pathlib import Path

import torch

from torchtitan.models.dit_tts.files import write_atomic


def write_wav(path: str | Path, waveform: torch.Tensor, sample_rate: int) -> None:
    """Writes (samples,) float in [-1, 1] as 16-bit PCM, replacing the file at once."""
    import soundfile

    buffer = io.BytesIO()
    samples = waveform.detach().cpu().clamp(-1.0, 1.0).numpy()
    soundfile.write(buffer, samples, sample_rate, format="WAV", subtype="PCM_16")
    write_atomic(Path(path), buffer.getvalue())
