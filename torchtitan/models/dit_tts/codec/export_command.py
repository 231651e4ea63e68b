"""`titan-tts export-codec`: DAC-VAE weights to a safetensors file, folded and without the watermark."""

import argparse
from pathlib import Path

from torchtitan.models.dit_tts.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", help="weights.pth, a folder with it, or a hub name")
    parser.add_argument("output", help="the file to write, OUT.safetensors; replaced if there")


def run(options: argparse.Namespace) -> int:
    from torchtitan.models.dit_tts.codec.dac_vae import export_safetensors, load_dac_vae

    output = Path(options.output)
    if output.suffix != ".safetensors":
        raise InputError(f"{output}: must end in .safetensors, by which the file is known again")
    codec = load_dac_vae(options.weights)
    if codec is None:
        raise InputError(
            f"{options.weights}: there is no such file or folder, and it is no hub name; give the path "
            "of a DAC-VAE's weights.pth"
        )
    try:
        export_safetensors(codec, output)
    except OSError as error:
        raise InputError(f"{output}: cannot be written ({error.strerror or error})") from None
    print(f"{output}: codec {codec.fingerprint}, {output.stat().st_size / 1e6:.1f} MB")
    return 0
