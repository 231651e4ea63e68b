"""Options of `titan-tts convert`."""

from dataclasses import dataclass
from typing import Literal

import tyro


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
