"""DAC-VAE checkpoints with random weights, in the layout of the released `weights.pth`.

`layout` names every tensor of the released model with its shape, the watermark branch included;
`write_tiny_dac_vae` writes a file of that layout that is small enough for a test. Written from the
layout alone, without the code that reads such files.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kwargs:
    """The metadata's kwargs, under the names that the released file has. Defaults: the released model."""

    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 8, 10, 12)
    latent_dim: int = 1024
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (12, 10, 8, 2)
    codebook_dim: int = 128
    sample_rate: int = 48_000


@dataclass(frozen=True)
class WatermarkSizes:
    """Widths of the watermark branch; they are not in the metadata. Defaults: the released model."""

    rates: tuple[int, ...] = (8, 5, 4, 2)
    channels: int = 32
    hidden: int = 512
    latent: int = 128
    bits: int = 16
    lstm_layers: int = 2


RELEASED, RELEASED_WATERMARK = Kwargs(), WatermarkSizes()
RELEASED_PARAMETERS = 107_671_171
# The watermark layers have a third and a sixth of a block's width: 96 is the smallest width that divides.
TINY = Kwargs(encoder_dim=4, latent_dim=64, decoder_dim=96)
TINY_WATERMARK = WatermarkSizes(channels=2, hidden=32, latent=8, bits=4)


def layout(kwargs: Kwargs, watermark: WatermarkSizes | None) -> dict[str, Shape]:
    """Names and shapes of a checkpoint's tensors; without `watermark` only the audio's path.

    Weight-normed convolutions have `weight_g` (first axis, 1, 1) and `weight_v`. A transposed one's
    first axis are its inputs.
    """
    shapes: dict[str, Shape] = {}

    def plain(name: str, first: int, second: int, kernel: int, transposed: bool = False) -> None:
        shapes[f"{name}.weight"] = (first, second, kernel)
        shapes[f"{name}.bias"] = (second if transposed else first,)

    def normed(name: str, first: int, second: int, kernel: int, transposed: bool = False) -> None:
        shapes[f"{name}.bias"] = (second if transposed else first,)
        shapes[f"{name}.weight_g"] = (first, 1, 1)
        shapes[f"{name}.weight_v"] = (first, second, kernel)

    def snake(name: str, width: int) -> None:
        shapes[f"{name}.alpha"] = (1, width, 1)

    def residual(name: str, width: int) -> None:
        snake(f"{name}.block.0", width)
        normed(f"{name}.block.1", width, width, 7)
        snake(f"{name}.block.2", width)
        normed(f"{name}.block.3", width, width, 1)

    def lstm(name: str, width: int, layers: int) -> None:
        for layer in range(layers):
            for kind in ("ih", "hh"):
                shapes[f"{name}.weight_{kind}_l{layer}"] = (4 * width, width)
                shapes[f"{name}.bias_{kind}_l{layer}"] = (4 * width,)

    width = kwargs.encoder_dim
    normed("encoder.block.0", width, 1, 7)
    for number, stride in enumerate(kwargs.encoder_rates, start=1):
        for unit in range(3):
            residual(f"encoder.block.{number}.block.{unit}", width)
        snake(f"encoder.block.{number}.block.3", width)
        normed(f"encoder.block.{number}.block.4", 2 * width, width, 2 * stride)
        width *= 2
    last = len(kwargs.encoder_rates) + 1
    snake(f"encoder.block.{last}", width)
    normed(f"encoder.block.{last + 1}", kwargs.latent_dim, width, 3)
    normed("quantizer.in_proj", 2 * kwargs.codebook_dim, kwargs.latent_dim, 1)
    normed("quantizer.out_proj", kwargs.latent_dim, kwargs.codebook_dim, 1)

    width = kwargs.decoder_dim
    normed("decoder.model.0", width, kwargs.latent_dim, 7)
    for number, stride in enumerate(kwargs.decoder_rates, start=1):
        block, half = f"decoder.model.{number}.block", width // 2
        snake(f"{block}.0", width)
        normed(f"{block}.1", width, half, 2 * stride, transposed=True)
        for position in (4, 5, 8):
            residual(f"{block}.{position}", half)
        if watermark is not None:
            rate, third = watermark.rates[number - 1], half // 3
            plain(f"{block}.3", width // 3, third, 2 * rate, transposed=True)
            for position in (6, 7):
                plain(f"{block}.{position}.block.1", third // 2, third, 3)
                plain(f"{block}.{position}.block.3", third, third // 2, 1)
            plain(f"{block}.11", width // 3, third, 2 * rate)
        width = half
    snake("decoder.wm_model.encoder_block.pre.0", width)
    normed("decoder.wm_model.encoder_block.pre.1", 1, width, 7)
    if watermark is not None:
        name, hidden = "decoder.wm_model", watermark.hidden
        plain(f"{name}.encoder_block.pre.3", watermark.channels, 1, 7)
        lstm(f"{name}.encoder_block.post.0.lstm", hidden, watermark.lstm_layers)
        plain(f"{name}.encoder_block.post.2", watermark.latent, hidden, 7)
        shapes[f"{name}.msg_processor.msg_processor.weight"] = (
            2 * watermark.bits,
            watermark.latent,
        )
        plain(f"{name}.decoder_block.pre.0", hidden, watermark.latent, 7)
        lstm(f"{name}.decoder_block.pre.1.lstm", hidden, watermark.lstm_layers)
        plain(f"{name}.decoder_block.post.1", 1, watermark.channels, 7)
    return shapes


def random_state_dict(
    kwargs: Kwargs, watermark: WatermarkSizes | None, seed: int = 0
) -> dict[str, Tensor]:
    """Weights under which a signal neither dies nor explodes, and every layer matters."""
    generator = torch.Generator().manual_seed(seed)
    shapes = layout(kwargs, watermark)
    # A transposed convolution adds two inputs into each output, of 2 * stride that its norm is over.
    # The last one is quiet, so that tanh does not saturate and hide differences.
    gains = {
        f"decoder.model.{number}.block.1.weight_g": math.sqrt(stride / 2)
        for number, stride in enumerate(kwargs.decoder_rates, start=1)
    } | {"decoder.wm_model.encoder_block.pre.1.weight_g": 0.15}
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("alpha"):
            tensor = 0.5 + 1.5 * torch.rand(shape, generator=generator)
        elif name.endswith("weight_g"):
            residual = ".block.3.weight_g" in name
            gain = 0.4 if residual else gains.get(name, 0.9)
            tensor = gain * (0.7 + 0.6 * torch.rand(shape, generator=generator))
        else:
            tensor = torch.randn(shape, generator=generator)
            if name.endswith("bias"):
                tensor *= 0.1
            elif name.endswith("weight"):
                tensor /= math.sqrt(math.prod(shape[1:]))
        tensors[name] = tensor
    return tensors


def write_dac_vae(
    path: Path, kwargs: Kwargs, watermark: WatermarkSizes | None, seed: int = 0
) -> Path:
    """A file as the released one: state dict and metadata."""
    metadata = {
        "kwargs": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(kwargs).items()}
    }
    torch.save(
        {"state_dict": random_state_dict(kwargs, watermark, seed), "metadata": metadata}, path
    )
    return path


def write_tiny_dac_vae(folder: str | Path, seed: int = 0, watermark: bool = True) -> Path:
    """`folder`/weights.pth: released structure, rates and latents (48 kHz, hop 1920, 128), few channels."""
    branch = TINY_WATERMARK if watermark else None
    return write_dac_vae(Path(folder) / "weights.pth", TINY, branch, seed)
