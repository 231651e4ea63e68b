"""The pitch of a voice by SwiftF0, a network of 14,386 parameters that comes inside its wheel (MIT)."""

import numpy as np
import torch

from torchtitan.models.dit_tts.errors import require_modules
from torchtitan.models.dit_tts.speech.scoring.interface import Sound

_RATE = 16_000  # Hz
_LOW, _HIGH = 50.0, 600.0  # Hz, of speech
_VOICED = 0.5  # confidence, as the package counts
_PEAK = 0.5  # the network takes a quiet sound for silence


class PitchTracker:
    """Describes a voice in Hz and semitones; where the recordings are another voice's, it says so without any embedding."""

    name = "SwiftF0"

    def __init__(self) -> None:
        """Raises InputError if the extra is not installed. It runs on the CPU."""
        require_modules("swift_f0")
        from swift_f0 import SwiftF0

        self.network = SwiftF0(threads=torch.get_num_threads(), spin=False)

    def measure(self, sound: Sound) -> tuple[float, float] | tuple[None, None]:
        """Median of the voiced frames in Hz, and from their 10th to their 90th percentile in semitones, which an octave
        wrong here and there does not move; None where nothing is voiced."""
        samples = sound.samples(_RATE)
        peak = np.abs(samples).max(initial=0.0)
        if not peak:
            return None, None
        found = self.network.detect(samples * (_PEAK / peak), _RATE, fmin=_LOW, fmax=_HIGH)
        voiced = found.pitch_hz[found.confidence >= _VOICED]
        if not len(voiced):
            return None, None
        low, median, high = np.quantile(voiced, [0.1, 0.5, 0.9])
        return float(median), float(12 * np.log2(high / low))
