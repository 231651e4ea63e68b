"""Resemblyzer's voice encoder: a small speaker encoder whose weights come inside its wheel, so that it needs no download.

A GE2E network (Wan et al., "Generalized End-to-End Loss for Speaker Verification", ICASSP 2018). Only the weights
of the package are read: importing it would need librosa and webrtcvad, which has no wheel.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from torchtitan.models.dit_tts.bounded import as_weights, read_pickle
from torchtitan.models.dit_tts.errors import reading, require_modules
from torchtitan.models.dit_tts.speech.scoring.interface import Sound

_RATE = 16_000  # Hz
_WINDOW, _HOP = 400, 160  # samples: 25 and 10 ms
_MELS, _SIZE, _LAYERS = 40, 256, 3
_FRAMES = 160  # that the network was trained on at once
_STEP = 80  # frames between two parts of a longer sound
_LEVEL_DB = -30.0  # dBFS; quieter sounds are brought to it, as in training
_BATCH = 256  # parts at once


class VoiceEncoder(nn.Module):
    """Power mel spectrograms (B, frames, 40) -> unit vectors (B, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_MELS, _SIZE, _LAYERS, batch_first=True)
        self.linear = nn.Linear(_SIZE, _SIZE)

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        return nn.functional.normalize(self.linear(hidden[-1]).relu(), dim=1)


class ResemblyzerEncoder:
    """A sound's embedding is the mean of those of its parts of 1.6 s, of unit length."""

    name = "voice encoder of Resemblyzer"

    def __init__(self, device: str = "cpu") -> None:
        from transformers.audio_utils import mel_filter_bank

        self.device = torch.device(device)
        self.network = _load_weights(VoiceEncoder()).to(self.device).eval()
        bank = mel_filter_bank(
            _WINDOW // 2 + 1, _MELS, 0.0, _RATE / 2, _RATE, norm="slaney", mel_scale="slaney"
        )
        self.bank = torch.from_numpy(bank).float().to(self.device)
        self.window = torch.hann_window(_WINDOW, device=self.device)

    def embed(self, sounds: Sequence[Sound]) -> np.ndarray:
        """(n, 256) float32; of unit length, or zeros for a sound in which the network hears nothing."""
        parts = [self._parts(sound) for sound in sounds]
        owner = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
        sums = np.zeros((len(parts), _SIZE), np.float32)
        with torch.inference_mode():
            every = torch.cat(parts) if parts else torch.zeros(0, _FRAMES, _MELS)
            for start in range(0, len(every), _BATCH):
                found = self.network(every[start : start + _BATCH]).cpu().numpy()
                np.add.at(sums, owner[start : start + _BATCH], found)
        return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)

    def _parts(self, sound: Sound) -> Tensor:
        """(parts, 160, 40): steps of 0.8 s; the last part ends with the sound."""
        samples = torch.from_numpy(sound.samples(_RATE)).to(self.device)
        if len(samples) == 0:
            samples = torch.zeros(1, device=self.device)
        # A shorter sound is repeated: zeros at the end would be what the network remembers last.
        if len(samples) < _FRAMES * _HOP:
            samples = samples.repeat(-(-_FRAMES * _HOP // len(samples)))[: _FRAMES * _HOP]
        level = 10 * torch.log10(samples.square().mean().clamp_min(1e-12))
        samples = samples * 10 ** ((_LEVEL_DB - level).clamp_min(0) / 20)
        spectrum = torch.stft(
            samples, _WINDOW, _HOP, window=self.window, pad_mode="constant", return_complex=True
        )
        mels = spectrum.abs().square().T @ self.bank
        last = len(mels) - _FRAMES
        starts = [*range(0, last, _STEP), last]
        return torch.stack([mels[start : start + _FRAMES] for start in starts])


def _load_weights(network: VoiceEncoder) -> VoiceEncoder:
    require_modules("resemblyzer")
    spec = find_spec("resemblyzer")
    folders = (spec.submodule_search_locations if spec else None) or []
    path = Path(next(iter(folders), ""), "pretrained.pt")
    with reading(path, "install Resemblyzer 0.1.4 again"):
        state = as_weights(read_pickle(path)["model_state"])
        network.load_state_dict({name: state[name] for name in network.state_dict()})
    return network
