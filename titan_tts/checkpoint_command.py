"""`titan-tts checkpoint verify`: compares a run's checkpoints with their manifests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from torchtitan.models.dit_tts.config.shipped import shipped_path
from torchtitan.models.dit_tts.errors import InputError, show


@dataclass
class Options:
    """Compare every file of a run's checkpoints with its manifest; changes nothing."""

    action: tyro.conf.Positional[Literal["verify"]]
    """Action."""

    run: tyro.conf.Positional[str]
    """The run's folder, outputs/NAME, or one checkpoint, outputs/NAME/checkpoint/step-N."""


def run(options: Options) -> int:
    """Prints a line per checkpoint. Returns 1 if one is corrupt or cannot be read."""
    given = Path(shipped_path(options.run))
    if not given.is_dir():
        raise InputError(f"{given} is not a folder; give the folder of a run or a checkpoint")

    from torchtitan.models.dit_tts.config.manager import load_run_config
    from torchtitan.models.dit_tts.run.checkpoint_storage import verify
    from torchtitan.models.dit_tts.run.manifest import checkpoint_steps

    if (given / "config.toml").is_file():
        folder = given / load_run_config(given).checkpoint.folder
        paths = [folder / f"step-{step}" for step in checkpoint_steps(folder)]
    else:
        paths = [given]
    if not paths:
        raise InputError(f"{folder} has no checkpoints")

    failed = False
    for path in paths:
        try:
            problem = verify(path)
        except InputError as error:
            problem = str(error)
        show(f"{path}: {problem or 'valid'}")
        failed |= bool(problem)
    return int(failed)
