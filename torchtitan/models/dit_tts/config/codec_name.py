"""Parsing of a codec's name with a vocoder, which makes its waveforms: mel_dct+vocoder."""

import os
import re

from torchtitan.models.dit_tts.files import local_path

STATISTICS_NAME = "mel_dct_stats.json"
"""the file of mel_dct's constants; its path, too, names that codec"""

VOCODERS = {16_000: "vocoder", 24_000: "vocoder24k"}
"""those that are shipped, by their waveforms' rate in Hz; another is named by its .safetensors file"""

_WITH_VOCODER = re.compile(rf"(mel_dct|(?:.*/)?{re.escape(STATISTICS_NAME)})\+(.+)", re.DOTALL)


def split_vocoder(name: str) -> tuple[str, str]:
    """(codec without it, vocoder); the latter is empty where the name has none, or is that of a file."""
    found = _WITH_VOCODER.fullmatch(name)
    return (found[1], found[2]) if found and not os.path.exists(name) else (name, "")


def from_any_folder(name: str) -> str:
    """The name with absolute paths for what exists."""
    codec, vocoder = split_vocoder(name)
    if os.path.exists(os.path.expanduser(codec)):
        codec = local_path(codec)
    if vocoder not in ("", *VOCODERS.values()):
        vocoder = local_path(vocoder)
    return f"{codec}+{vocoder}" if vocoder else codec
