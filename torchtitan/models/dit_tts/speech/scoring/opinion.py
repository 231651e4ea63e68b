"""Predicted opinion scores: DNSMOS, whose small networks come with the PyPI package speechmos (MIT)."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from torchtitan.models.dit_tts.errors import require_modules
from torchtitan.models.dit_tts.speech.scoring.interface import Sound

_RATE = 16_000  # Hz
_WINDOW = int(9.01 * _RATE)  # samples that the network hears
# From the network's overall score to that of the listeners, as DNSMOS publishes it.
_CALIBRATION = (-0.06766283, 1.11546468, 0.04602535)


class DNSMOS:
    """Overall quality by DNSMOS P.835 (Reddy et al. 2022).

    It was trained on noisy speech and noise suppressors: it hears noise, clicks and distortion, but not
    wrong words, a wrong voice or dull prosody, and it was never trained on synthesized speech. It hears
    16 kHz. Compare systems by it; the absolute value does not replace a listening test.
    """

    name = "DNSMOS P.835 overall"

    def __init__(self, device: str = "cpu") -> None:
        """Raises InputError if the extra is not installed. It runs on the CPU, whatever the device."""
        require_modules("speechmos", "onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # speechmos.dnsmos itself needs librosa, for a second network that is not used here.
        package = find_spec("speechmos")
        assert package is not None and package.submodule_search_locations
        path = Path(package.submodule_search_locations[0], "dnsmos_models/sig_bak_ovr.onnx")
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )

    def score(self, sound: Sound) -> float:
        """Mean over windows of 9 s, one per second, as the package does; a short sound is repeated.

        A sound without a sample has the score of silence.
        """
        samples = sound.samples(_RATE)
        if not len(samples):
            samples = np.zeros(_WINDOW, dtype=np.float32)
        while len(samples) < _WINDOW:
            samples = np.concatenate([samples, samples])
        windows = int(len(samples) // _RATE - _WINDOW / _RATE) + 1
        scores = []
        for start in range(0, windows * _RATE, _RATE):
            window = samples[None, start : start + _WINDOW]
            scored = np.asarray(self.session.run(None, {"input_1": window})[0])
            scores.append(np.polyval(_CALIBRATION, scored[0, 2]))
        return float(np.clip(np.mean(scores), 1.0, 5.0))
