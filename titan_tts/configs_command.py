"""`titan-tts configs`: lists the configs that come with the package, or copies one."""

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from torchtitan.models.dit_tts.config.shipped import find_config, shipped_configs
from torchtitan.models.dit_tts.errors import InputError


@dataclass
class Options:
    copy: str = ""
    """Name of a config to copy into the current folder, to be edited there."""


def run(options: Options) -> int:
    if not options.copy:
        for name, path in shipped_configs().items():
            print(f"{name:<12} {tomllib.loads(path.read_text())['job']['description']}")
        return 0
    source = find_config(options.copy)
    target = Path(source.name)
    if target.exists():
        raise InputError(f"{target} exists already; move it away or work in another folder")
    shutil.copyfile(source, target)
    print(f"{target}: train it with titan-tts train {target}")
    return 0
