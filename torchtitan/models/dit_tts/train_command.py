"""`titan-tts train`: one training process, or several of this machine under torchrun."""

import os
from dataclasses import dataclass, field

import tyro

from torchtitan.models.dit_tts.config.shipped import find_config


@dataclass
class Options:
    """Train a model.

    Every key of the config is an option, too: --section.key value, which wins over the file.
    """

    config: tyro.conf.Positional[str] = ""
    """TOML file, or the name of a config that `titan-tts configs` lists."""

    nproc: int = 1
    """Processes on this machine, one per GPU. For several machines: torchrun ... -m titan_tts train."""

    dry_run: bool = False
    """Train nothing: print parameters, memory per GPU, downloads and the arithmetic of a step."""

    dry_run_gpus: int = 0
    """The same for this number of GPUs."""

    help_config: bool = False
    """List the keys of a config."""

    help_all: bool = False
    """List upstream's keys that this model family does not use, too."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)


def run(options: Options) -> int:
    """Trains. Returns the exit status."""
    args = options.config_args
    if options.config:
        args = ["--job.config_file", str(find_config(options.config).resolve()), *args]
    if options.dry_run_gpus:
        args += ["--dry-run-gpus", str(options.dry_run_gpus)]
    flags = {"--help": "help_config", "--help-all": "help_all", "--dry-run": "dry_run"}
    args += [flag for flag, name in flags.items() if getattr(options, name)]
    # Batches of several shapes fragment the allocator's fixed segments.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if options.nproc > 1 and not any(arg.startswith(("--dry-run", "--help")) for arg in args):
        from torchtitan.models.dit_tts.torchrun import launch

        processes = ["--standalone", "--nproc_per_node", str(options.nproc)]
        return launch([*processes, "-m", "titan_tts", "train", *args])
    from torchtitan.models.dit_tts.main import train

    return train(args)
