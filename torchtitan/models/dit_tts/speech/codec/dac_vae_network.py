"""The DAC-VAE's network: transformers' DAC encoder and decoder with a 1x1 bottleneck between them.

    waveform (B, 1, T * hop)
      -> encoder                    features (B, 1024, T)
      -> in_proj 1x1                mean and scale (B, 2 * 128, T); the latents are the mean
      -> out_proj 1x1               features (B, 1024, T)
      -> decoder, Snake, conv, tanh waveform (B, 1, T * hop)

Widths are those of the released model, `facebook/dacvae-watermarked`. It stores the last Snake and
convolution in its watermark branch; the rest of that branch only adds the watermark.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DacVaeSizes:
    """The sizes that determine the network's shapes, and the rate of its waveforms."""

    encoder_dim: int  # channels after the first convolution; each stride doubles them
    strides: tuple[int, ...]  # of the encoder; the decoder's are the same in reverse
    feature_dim: int  # channels between encoder and bottleneck
    decoder_dim: int  # channels before the decoder's first stride; each halves them
    latent_channels: int
    sample_rate: int  # Hz

    @property
    def hop_length(self) -> int:
        """Samples per latent frame."""
        return math.prod(self.strides)


class DacVae(nn.Module):
    """Encoder, bottleneck and decoder, without weight norm."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, sizes: DacVaeSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder = encoder
        self.in_proj = nn.Conv1d(sizes.feature_dim, 2 * sizes.latent_channels, kernel_size=1)
        self.out_proj = nn.Conv1d(sizes.latent_channels, sizes.feature_dim, kernel_size=1)
        self.decoder = decoder

    def encode(self, waveforms: Tensor) -> Tensor:
        """Waveforms (B, T * hop) -> posterior means (B, T, channels)."""
        mean, _ = self.in_proj(self.encoder(waveforms[:, None])).chunk(2, dim=1)
        return mean.transpose(1, 2)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, T, channels) -> waveforms (B, T * hop) in [-1, 1]."""
        return self.decoder(self.out_proj(latents.transpose(1, 2)))[:, 0]


def build_network(sizes: DacVaeSizes) -> DacVae:
    """The network on the meta device, without weights."""
    from transformers.models.dac.configuration_dac import DacConfig
    from transformers.models.dac.modeling_dac import DacDecoder, DacEncoder

    config = DacConfig(
        encoder_hidden_size=sizes.encoder_dim,
        downsampling_ratios=list(sizes.strides),
        decoder_hidden_size=sizes.decoder_dim,
        sampling_rate=sizes.sample_rate,
    )
    config.hidden_size = sizes.feature_dim  # the config takes it from the encoder's last width
    with torch.device("meta"):
        network = DacVae(DacEncoder(config), DacDecoder(config), sizes)
    return network.eval().requires_grad_(False)


def released_names(strides: int) -> dict[str, str]:
    """Layer of `DacVae` -> its name in the released state dict, for this number of strides."""
    names = {
        "encoder.conv1": "encoder.block.0",
        "encoder.snake1": f"encoder.block.{strides + 1}",
        "encoder.conv2": f"encoder.block.{strides + 2}",
        "in_proj": "quantizer.in_proj",
        "out_proj": "quantizer.out_proj",
        "decoder.conv1": "decoder.model.0",
        "decoder.snake1": "decoder.wm_model.encoder_block.pre.0",
        "decoder.conv2": "decoder.wm_model.encoder_block.pre.1",
    }
    unit_layers = {"snake1": 0, "conv1": 1, "snake2": 2, "conv2": 3}
    for number in range(strides):
        encoder, decoder = f"encoder.block.{number + 1}.block", f"decoder.model.{number + 1}.block"
        names[f"encoder.block.{number}.snake1"] = f"{encoder}.3"
        names[f"encoder.block.{number}.conv1"] = f"{encoder}.4"
        names[f"decoder.block.{number}.snake1"] = f"{decoder}.0"
        names[f"decoder.block.{number}.conv_t1"] = f"{decoder}.1"
        # Between the decoder's second and third unit are two of the watermark branch.
        for unit, (in_encoder, in_decoder) in enumerate(((0, 4), (1, 5), (2, 8)), start=1):
            for layer, place in unit_layers.items():
                ours = f"block.{number}.res_unit{unit}.{layer}"
                names[f"encoder.{ours}"] = f"{encoder}.{in_encoder}.block.{place}"
                names[f"decoder.{ours}"] = f"{decoder}.{in_decoder}.block.{place}"
    return names
