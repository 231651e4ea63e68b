"""`titan-tts autotune`: the fastest layout and the largest micro-batch of every bucket, by real steps."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro

from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError, quiet_known_warnings
from torchtitan.models.dit_tts.files import check_writable, local_path, write_atomic


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
    [data] path would have, else those of [benchmark]'s lengths."""

    gpu: str = ""
    """Name of the GPU for the first guess, as in `titan-tts plan`. Default: this machine's."""

    memory_gib: float = 0.0
    """Limit of the address space of each process; 0: none."""

    timeout_minutes: float = 20.0
    """Time limit of each trial."""

    work: str = ""
    """Folder of the trials; existing trials are not repeated. Default: outputs/autotune/CONFIG."""

    largest: bool = False
    """Give every bucket but the longest its largest batch. By default none has more frames in a global
    batch than the longest, which has the config's."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)


def run(options: Options) -> int:
    """Searches, prints the keys, and writes them to `--out`. Returns the exit status."""
    if options.nproc < 1:
        raise InputError(f"--nproc {options.nproc}, but it must be at least 1")
    path = find_config(options.config)
    from titan_tts.grids.autotune import Autotune
    from titan_tts.launch.supervisor import interrupt_on_signals
    from torchtitan.models.dit_tts.config.manager import load_config

    quiet_known_warnings()
    check_writable(options.out, "--out")
    config = load_config([f"--job.config_file={path}", *options.config_args])
    work = Path(local_path(options.work or f"outputs/autotune/{path.stem}"))
    interrupt_on_signals()
    found = Autotune(config, options, work / "trials").run()
    write_atomic(options.out, found.toml())
    write_atomic(work / "autotune.json", json.dumps(asdict(found), indent=1) + "\n")
    print(found.toml(), end="")
    print(f"written to {options.out}; put these keys into your config")
    return 0
