"""An analysis of milliseconds for `titan-tts collect --analyzer`, whose texts tell which samples they belong to."""

import hashlib
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import soundfile

RATE = 16_000
MEASURED = {"agreement": 1.0, "snr_db": 30.0, "clipped": 0.0, "loudness": -20.0}
MEASURED |= {"language": "en", "chars_per_second": 16.0, "quality": "high"}


def text_of(waveform: np.ndarray) -> str:
    """Return the text of a sound (samples,) float32: a digest of its samples in 16 bits, as a FLAC stores them."""
    return hashlib.sha256(np.round(waveform * 32768).astype("<i2").tobytes()).hexdigest()[:16]


class StandIn:
    """Every whole second is a segment. Voices are told by loudness, one to four; a recording takes `milliseconds`."""

    def __init__(self, milliseconds: float):
        self.milliseconds = milliseconds

    def analyze(self, samples: np.ndarray, rate: int) -> list[SimpleNamespace]:
        time.sleep(self.milliseconds / 1000)
        segments = []
        for second in range(len(samples) // rate):
            waveform = samples[second * rate : (second + 1) * rate].mean(axis=1)
            text, voice = text_of(waveform), int(min(3, 4 * np.abs(waveform).max()))
            found = {
                "start": float(second),
                "stop": second + 1.0,
                "text": text,
                "text_verbatim": text,
            }
            found |= {"embedding": np.eye(4, dtype=np.float32)[voice], "waveform": waveform}
            segments.append(SimpleNamespace(**found, **MEASURED))
        return segments


def stand_in(device: str, milliseconds: str = "0") -> StandIn:
    return StandIn(float(milliseconds))


def write_recordings(folder: Path, count: int, seed: int = 0) -> None:
    """Noise of one to five seconds and a bit, in four loudnesses."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        noise = rng.uniform(-1, 1, RATE * rng.integers(1, 6) + 100)
        level = (number % 4 + 0.9) / 4
        soundfile.write(folder / f"{number:03d}.wav", level * noise, RATE)
