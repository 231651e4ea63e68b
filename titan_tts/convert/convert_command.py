"""`titan-tts convert`: another project's weights as an exported folder, which every command takes, and back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from torchtitan.models.dit_tts.errors import InputError, require, show
from torchtitan.models.dit_tts.files import check_writable


@dataclass
class Options:
    """Write another project's model as a folder like that of `titan-tts export`, to speak with and to fine-tune; or
    such a folder in the other project's layout."""

    source: tyro.conf.Positional[str]
    """Weights (.safetensors) of Echo-TTS or Irodori-TTS, their folder, or their hub name; with --to a folder that
    `convert` or `export` wrote."""

    out: tyro.conf.Positional[str]
    """Folder to write, a new or an empty one."""

    to: Literal["", "echo", "irodori"] = ""
    """Project whose layout is written."""

    codec: str = ""
    """Codec of the model's latents: its path or hub name, by default Irodori-TTS's; package.module:factory for
    Echo-TTS's (docs/convert.md)."""

    tokenizer: str = ""
    """Irodori-TTS's tokenizer, a folder or hub name; by default the one that the model's config names."""


def run(options: Options) -> int:
    out = Path(options.out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"OUT = {out} exists already; give a new folder")
    require(
        not (options.to and (options.codec or options.tokenizer)),
        "--codec and --tokenizer are for a model of another project; leave them out with --to",
    )
    check_writable(out / "config.json", "OUT")
    from titan_tts.convert.convert import convert, convert_back

    show(convert_back(options, out) if options.to else convert(options, out))
    return 0
