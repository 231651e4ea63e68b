"""A codec that a user's function makes: package.module:factory:CHANNELS."""

import torch
from torch import Tensor

from torchtitan.models.dit_tts.speech.codec.interface import Codec


class SmallCodec(Codec):
    """A frame of 640 samples under a fixed orthonormal matrix, of which the first channels are kept."""

    def __init__(self, device: str, channels: str = "6"):
        self.name = "small"
        self.sample_rate, self.hop_length, self.latent_channels = 16_000, 640, int(channels)
        self.fingerprint = f"small-{channels}"
        generator = torch.Generator().manual_seed(1)
        self.basis = torch.linalg.qr(torch.randn(640, int(channels), generator=generator))[0]

    def to_whole_frames(self, waveforms: Tensor) -> Tensor:
        return torch.nn.functional.pad(waveforms, (0, -waveforms.shape[-1] % self.hop_length))

    def encode_batch(self, waveforms: Tensor) -> Tensor:
        return self.to_whole_frames(waveforms).unflatten(-1, (-1, self.hop_length)) @ self.basis

    def decode(self, latents: Tensor) -> Tensor:
        return (latents @ self.basis.T).flatten().clamp(-1, 1)
