"""Speech without torch, from a folder of `titan-tts export --onnx`: by numpy, onnxruntime, and espeak-ng for phones.

>>> voice = load("voice-onnx")
>>> waveform = voice.speak("Good morning.")        # (samples,) float32 in [-1, 1], voice.sample_rate per second
"""

from pathlib import Path
from typing import TYPE_CHECKING

from titan_tts.overlay import install_overlay

if TYPE_CHECKING:
    from titan_tts.onnx_voice.voice import OnnxVoice


def load(folder: str | Path, threads: int = 1) -> "OnnxVoice":
    """The voice of a folder, which may be a stranger's. `threads`: of onnxruntime; 0: one for each core. Raises InputError for
    another folder."""
    install_overlay(upstream=False)
    from titan_tts.onnx_voice.voice import open_voice

    return open_voice(Path(folder), threads)
