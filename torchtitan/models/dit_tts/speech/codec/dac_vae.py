"""The DAC-VAE codec: 48 kHz speech <-> 25 latent frames per second of 128 channels, learned.

The latents are the posterior mean. Everything runs in float32: in bfloat16 an encoding is 5 % off.
A waveform's end is mirrored up to whole frames and no further (`DacVaeCodec.to_whole_frames`): what
follows the end changes about five frames before it, so recordings share a batch only where they have
equally many frames. Long audio is encoded in portions of bounded memory, with the result of one
piece (tiling.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtitan.models.dit_tts.speech.codec.dac_vae_network import build_network
from torchtitan.models.dit_tts.speech.codec.dac_vae_weights import (
    DacVaeWeights,
    find_weights,
    read_weights,
)
from torchtitan.models.dit_tts.speech.codec.interface import Codec, check_latents, check_waveforms
from torchtitan.models.dit_tts.speech.codec.tiling import decoder_context, encoder_context, portions

# Audio in the network at once. Measured at the released widths, a second takes about 70 MiB to encode
# and 110 MiB to decode. On a CPU more than two seconds are slower: the outputs of their layers exceed
# the 32 MiB that the C library's allocator reuses, so each is allocated from the system.
CPU_CHUNK_SECONDS = 2.0
GPU_CHUNK_SECONDS = 30.0


class DacVaeCodec(Codec):
    """`Codec` over a DAC-VAE's weights. Latents and waveforms come back on the CPU.

    Args:
        name: what `build_codec` loads this codec by, from any folder.
        chunk_seconds: audio in the network at once, over all rows of a batch, without a portion's
            context of about 0.5 s. By default what suits the device.
    """

    def __init__(
        self,
        weights: DacVaeWeights,
        name: str,
        device: str = "cpu",
        chunk_seconds: float | None = None,
    ) -> None:
        sizes = weights.sizes
        self.name = name
        self.sample_rate = sizes.sample_rate
        self.hop_length = sizes.hop_length
        self.latent_channels = sizes.latent_channels
        self.fingerprint = weights.fingerprint()
        self.device = torch.device(device)
        if chunk_seconds is None:
            chunk_seconds = CPU_CHUNK_SECONDS if self.device.type == "cpu" else GPU_CHUNK_SECONDS
        self.frames_at_once = max(1, int(chunk_seconds * self.frames_per_second))
        self.network = build_network(sizes)
        self.network.load_state_dict(weights.tensors, assign=True)
        self.network.requires_grad_(False).to(self.device)
        self.encoder_context = encoder_context(self.network.encoder, self.hop_length)
        self.decoder_context = decoder_context(self.network.decoder, self.hop_length)

    def to_whole_frames(self, waveforms: Tensor) -> Tensor:
        """Waveforms (..., samples) -> (..., T * hop_length), their end mirrored, as in training.

        What is too short to be mirrored is padded with zeros. The fingerprint covers this rule:
        another one makes other latents.
        """
        samples = waveforms.shape[-1]
        missing = -samples % self.hop_length
        if missing < samples:
            padding = waveforms[..., samples - 1 - missing : samples - 1].flip(-1)
        else:
            padding = waveforms.new_zeros(*waveforms.shape[:-1], missing)
        return torch.cat([waveforms, padding], dim=-1)

    @torch.no_grad()
    def encode_batch(self, waveforms: Tensor) -> Tensor:
        """Waveforms (B, samples) of equal length -> latents (B, ceil(samples / hop), channels)."""
        check_waveforms(waveforms)
        waveforms = waveforms.detach().float()
        hop, waveforms = self.hop_length, self.to_whole_frames(waveforms)
        rows, frames = waveforms.shape[0], waveforms.shape[1] // hop
        latents = torch.empty(rows, frames, self.latent_channels)
        with _full_float32(self.device):
            for one in portions(rows, frames, self.frames_at_once, self.encoder_context):
                given = waveforms[one.rows, one.given.start * hop : one.given.stop * hop]
                encoded = self.network.encode(given.to(self.device))
                latents[one.rows, one.frames] = encoded[:, one.kept].cpu()
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (T, channels) -> waveform (T * hop_length,) float32 in [-1, 1]."""
        check_latents(latents, self.latent_channels)
        latents = latents.detach().float()
        pieces = []
        with _full_float32(self.device):
            for one in portions(1, len(latents), self.frames_at_once, self.decoder_context):
                decoded = self.network.decode(latents[None, one.given].to(self.device))[0]
                pieces.append(decoded.unflatten(0, (-1, self.hop_length))[one.kept].cpu())
        return torch.cat(pieces).flatten()


@contextmanager
def _full_float32(device: torch.device) -> Iterator[None]:
    """No autocast, and no TF32 or bfloat16 inside float32 convolutions (cuDNN's default is TF32).

    Not `torch.backends.cudnn.flags`: it fails where a program has set a precision by the newer names.
    """
    backends = (torch.backends.cudnn.conv, torch.backends.mkldnn.conv)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def load_dac_vae(name: str, device: str = "cpu", chunk_seconds: float | None = None) -> DacVaeCodec:
    """The codec of a path or hub name."""
    file, full_name = find_weights(name)
    return DacVaeCodec(read_weights(file), full_name, device, chunk_seconds)
