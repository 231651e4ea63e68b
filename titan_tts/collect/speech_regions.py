"""Detection of a recording's speech: Silero's voice activity detector, in pieces of bounded memory.

The wheel silero-vad brings the network as TorchScript, which needs torch alone. It is loaded as a file: importing the
package would set torch's number of threads for the whole process.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from torchtitan.models.dit_tts.errors import InputError, require_modules

RATE = 16_000  # Hz, of all that listens
FRAME_MS = 32  # of the detector
_FRAME = RATE * FRAME_MS // 1000
_PIECE = 1875  # frames: a minute, heard without what came before but for the warm-up
_WARM_UP = 32  # frames, whose results are dropped
_PIECES = 16  # at once
# Speech starts where the probability reaches the first and ends where it falls below the second, as Silero advises.
_START, _END = 0.5, 0.35
_MIN_FRAMES = 4  # of a pause, and of speech: 0.128 s

Span = tuple[int, int]
"""Start and stop in ms"""


class SpeechDetector:
    """Silero's probabilities of speech."""

    def __init__(self, device: str = "cpu") -> None:
        require_modules("silero_vad")
        package = find_spec("silero_vad")
        path = Path(str(package and package.origin)).with_name("data") / "silero_vad.jit"
        try:
            self.network: Any = torch.jit.load(path, map_location=device).eval()
        except (ValueError, RuntimeError) as error:
            raise InputError(f"{path} cannot be loaded; install silero-vad again") from error
        self.device = device

    def probabilities(self, waveform: np.ndarray) -> np.ndarray:
        """(m,) at 16 kHz -> (frames,) of 32 ms; the last one is filled with zeros."""
        frames = -(-len(waveform) // _FRAME)
        count = max(1, -(-frames // _PIECE))
        padding = _WARM_UP * _FRAME, count * _PIECE * _FRAME - len(waveform)
        size = (_WARM_UP + _PIECE) * _FRAME
        pieces = sliding_window_view(np.pad(waveform, padding), size)[:: _PIECE * _FRAME]
        found = []
        for first in range(0, count, _PIECES):
            heard = torch.from_numpy(pieces[first : first + _PIECES].copy()).to(self.device)
            self.network.reset_states()
            with torch.inference_mode():
                each = [self.network(step, RATE)[:, 0] for step in heard.split(_FRAME, dim=1)]
            found.append(torch.stack(each, 1)[:, _WARM_UP:].cpu().numpy().reshape(-1))
        return np.concatenate(found)[:frames]


def speech_regions(probabilities: np.ndarray, duration: int) -> np.ndarray:
    """(n, 2) int64: start and stop of speech in ms, with pauses of at least 0.128 s between."""
    marks = np.where(probabilities >= _START, 1, np.where(probabilities < _END, 0, -1))
    # What is neither goes on as what was before; the recording starts in silence.
    marks = np.concatenate([[0], marks])
    decided = np.maximum.accumulate(np.where(marks >= 0, np.arange(len(marks)), 0))
    speech = marks[decided][1:] == 1
    for value in (False, True):  # first short pauses, then short speech
        for start, stop in _runs(speech == value):
            inside = value or 0 < start and stop < len(speech)
            if stop - start < _MIN_FRAMES and inside:
                speech[start:stop] = not value
    return np.minimum(_runs(speech) * FRAME_MS, duration)


def _runs(mask: np.ndarray) -> np.ndarray:
    """(n, 2) int64: start and stop of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return edges.reshape(-1, 2).astype(np.int64)


def frame_power(waveform: np.ndarray) -> np.ndarray:
    """(m,) at 16 kHz -> (frames,) mean square of 10 ms; an incomplete last frame is left out."""
    hop = RATE // 100
    whole = waveform[: len(waveform) // hop * hop].reshape(-1, hop)
    return np.einsum("ij,ij->i", whole, whole) / np.float32(hop)
