"""`titan-tts plan`: memory, time and MFU of a run before it starts, on any CPU."""

from dataclasses import dataclass, field

import tyro

from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError, check_range


@dataclass
class Options:
    """Predict time, memory and MFU of a run on a named GPU.

    Every key of the config is an option, too: --section.key value, which wins over the file.
    """

    config: tyro.conf.Positional[str] = ""
    """TOML file, or the name of a config that `titan-tts configs` lists."""

    gpu: str = "H200"
    """A100, H100, H100 PCIe, H200, ...; docs/plan.md lists all."""

    gpus: int = 0
    """Number of GPUs, whole nodes or less than one; 0: one node."""

    gpus_per_node: int = 0
    """GPUs of each node; 0: as usual, 4 of GH200 and 8 of all others."""

    inter_node_gbps: float = 0.0
    """GB/s between one node and the others, in one direction; 0: 50 per GPU, a guess."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)


def run(options: Options) -> int:
    """Prints a plan."""
    if not options.config:
        raise InputError("titan-tts plan needs a config, for example: titan-tts plan 800m")
    for name in ("gpus", "gpus_per_node", "inter_node_gbps"):
        check_range(f"--{name.replace('_', '-')}", getattr(options, name), 0, 10**6)
    path = find_config(options.config)
    # torch takes seconds to import.
    from titan_tts.plan.report import print_plan

    print_plan(path, options)
    return 0
