"""`titan-tts export-codec`: DAC-VAE weights to a safetensors file."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from torchtitan.models.dit_tts.errors import InputError, show
from torchtitan.models.dit_tts.files import check_writable


@dataclass
class Options:
    """Write a DAC-VAE's weights to a safetensors file, folded and without the watermark."""

    weights: tyro.conf.Positional[str]
    """A weights.pth, a folder with it, or a hub name."""

    output: tyro.conf.Positional[str]
    """The .safetensors file to write; replaced if it exists."""


def run(options: Options) -> int:
    from torchtitan.models.dit_tts.speech.codec.dac_vae import load_dac_vae
    from torchtitan.models.dit_tts.speech.codec.dac_vae_weights import write_safetensors

    output = Path(options.output)
    if output.suffix != ".safetensors":
        raise InputError(f"output = {output}, but its name must end in .safetensors")
    check_writable(output, "output")
    codec = load_dac_vae(options.weights)
    write_safetensors(codec.network, output)
    show(f"{output}: codec {codec.fingerprint}, {output.stat().st_size / 1e6:.1f} MB")
    return 0
