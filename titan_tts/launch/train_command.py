"""`titan-tts train`: one training process, or several of this machine, or of several, under torchrun."""

import os
import re
from dataclasses import dataclass, field

import tyro

from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError, check_range


@dataclass
class Options:
    """Train a model.

    Every key of the config is an option, too: --section.key value, which wins over the file.
    """

    config: tyro.conf.Positional[str] = ""
    """TOML file, or the name of a config that `titan-tts configs` lists."""

    nproc: int = 1
    """Processes on this machine, one per GPU."""

    nodes: int = 1
    """Number of machines; start the same command on each."""

    rendezvous: str = ""
    """HOST:PORT through which several machines connect: a free port of one of them."""

    dry_run: bool = False
    """Train nothing: print parameters, memory per GPU and the arithmetic of a step on --nproc times --nodes
    GPUs, or on as many as the degrees in [parallelism] make."""

    help_config: bool = False
    """List the keys of a config."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)


def run(options: Options) -> int:
    # Batches of several shapes fragment the allocator's fixed segments.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    args = list(options.config_args)
    if options.config:
        args = ["--job.config_file", str(find_config(options.config).resolve()), *args]
    processes = options.nproc * options.nodes
    check_range("--nproc", options.nproc, 1, 10**6)
    check_range("--nodes", options.nodes, 1, 10**6)
    if options.help_config:
        args = ["--help"]
    elif options.dry_run:
        from titan_tts.plan.report import print_dry_run

        print_dry_run(args, processes)
        return 0
    elif processes > 1:
        from titan_tts.launch.torchrun import launch
        from torchtitan.models.dit_tts.config.batch_split import data_parallel_degree
        from torchtitan.models.dit_tts.config.manager import load_config

        # Most mistakes are said here, once, before the processes start.
        data_parallel_degree(load_config(args), processes)
        group = [*_meeting(options), "--nproc_per_node", str(options.nproc)]
        return launch([*group, "-m", "titan_tts", "train", *args])
    from torchtitan.models.dit_tts import main

    return main.train(args)


def _meeting(options: Options) -> list[str]:
    """torchrun's arguments for the rendezvous of the machines."""
    if options.nodes == 1:
        return ["--standalone"]
    if not re.fullmatch(r"[^\s:]+:\d+", options.rendezvous):
        raise InputError(
            f"--rendezvous {options.rendezvous!r} with --nodes {options.nodes}: give HOST:PORT, a free port of "
            f"one of the machines, the same on all of them"
        )
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", options.rendezvous]
    return ["--nnodes", str(options.nodes), *meeting]
