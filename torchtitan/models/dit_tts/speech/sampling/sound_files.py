"""Waveforms as the bytes of a sound file; a wav of known length can be sent before it is complete."""

import io
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.files import write_atomic

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MEDIA_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "mp3": "audio/mpeg",
}
"""format -> its media type"""

STREAMED = ("wav", "pcm")
"""formats that can be sent piece by piece"""

SUFFIXES = {".wav": "wav", ".flac": "flac", ".ogg": "opus", ".opus": "opus", ".mp3": "mp3"}
"""a file's suffix -> its format"""

_SOUNDFILE = {"flac": ("FLAC", "PCM_16"), "opus": ("OGG", "OPUS"), "mp3": ("MP3", None)}
_RATES = {
    "opus": (8000, 12000, 16000, 24000, 48000),
    "mp3": (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000),
}


def pcm(waveform: "Tensor") -> bytes:
    """(samples,) in [-1, 1] as 16-bit little-endian samples."""
    scaled = (waveform.clamp(-1.0, 1.0) * 32767).round()
    return scaled.numpy().astype("<i2").tobytes()


class PcmResampler:
    """Turns 16-bit samples at `rate` into those at `target`, in Hz. Parts of a sound that are given one after the other have
    no joints: the last few milliseconds of each come with the next."""

    def __init__(self, rate: int, target: int):
        self._stream = None
        if rate != target:
            import soxr

            self._stream = soxr.ResampleStream(rate, target, 1, "int16", "HQ")

    def __call__(self, samples: bytes, last: bool = False) -> bytes:
        import numpy as np

        if self._stream is None:
            return samples
        return self._stream.resample_chunk(np.frombuffer(samples, np.int16), last).tobytes()


def wav_header(samples: int, sample_rate: int) -> bytes:
    """The header of one channel of 16 bits."""
    size = 2 * samples
    require(size < 2**32 - 64, f"{samples:,} samples exceed a wav's 4 GiB; give another format")
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", 36 + size, b"WAVE")
        + form
        + struct.pack("<4sI", b"data", size)
    )


def encoded(waveform: "Tensor", sample_rate: int, kind: str, bit_rate: int = 0) -> bytes:
    """A complete file of one of MEDIA_TYPES. `bit_rate`: of an mp3, constant; 0: variable, by quality."""
    if kind == "pcm":
        return pcm(waveform)
    if kind == "wav":
        return wav_header(len(waveform), sample_rate) + pcm(waveform)
    import soundfile

    samples = waveform.clamp(-1.0, 1.0).numpy()
    if sample_rate not in _RATES.get(kind, (sample_rate,)):
        from torchtitan.models.dit_tts.speech.audio import resample

        samples, sample_rate = resample(samples, sample_rate, 48000).clip(-1.0, 1.0), 48000
    if bit_rate:
        return _mp3(samples, sample_rate, bit_rate)
    buffer = io.BytesIO()
    form, subtype = _SOUNDFILE[kind]
    soundfile.write(buffer, samples, sample_rate, format=form, subtype=subtype)
    return buffer.getvalue()


def _mp3(samples: "np.ndarray", sample_rate: int, bit_rate: int) -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp3") as file:
        stream = file.add_stream("libmp3lame", rate=sample_rate, layout="mono")
        stream.bit_rate = bit_rate
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = sample_rate
        for part in (frame, None):
            file.mux(stream.encode(part))
    return buffer.getvalue()


def write_sound(path: str | Path, waveform: "Tensor", sample_rate: int) -> None:
    """Writes (samples,) in [-1, 1] in the format of the path's suffix, replacing the file at once."""
    kind = SUFFIXES[Path(path).suffix.lower()]
    write_atomic(path, encoded(waveform.detach().cpu(), sample_rate, kind))
