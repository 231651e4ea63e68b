"""Options of `titan-tts autotune`."""

from dataclasses import dataclass, field
from pathlib import Path

import tyro


@dataclass
class Options:
    """Find the fastest layout and the largest micro-batch of every length bucket, by training steps.

    Every key of the config is an option, too: --section.key value, which wins over the file.
    """

    config: tyro.conf.Positional[str]
    """TOML file, or the name of a config that `titan-tts configs` lists."""

    nproc: int = 1
    """Processes on this machine, one per GPU."""

    out: Path = Path("autotune.toml")
    """TOML file for the chosen keys."""

    layouts: list[str] = field(default_factory=list)
    """Layouts to compare: ddp, fsdp, hsdp, RxS. Default: the config's own."""

    checkpointing: list[str] = field(default_factory=list)
    """Kinds of activation checkpointing to compare: none, full, op, 'every N', 'memory_budget F'. Default:
    the config's own."""

    buckets: list[int] = field(default_factory=list)
    """Upper lengths of the buckets in frames. Default: [data] bucket_frames, else those that the data of
    [data] path would have."""

    memory_gib: float = 0.0
    """Limit of the address space of each process; 0: none."""

    timeout_minutes: float = 20.0
    """Time limit of each trial."""

    work: str = ""
    """Folder of the trials; existing trials are not repeated. Default: outputs/autotune/CONFIG."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)
