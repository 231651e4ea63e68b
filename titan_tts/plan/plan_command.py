"""`titan-tts plan`: memory, time and MFU of a run before it starts, on any CPU."""

import json
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

    price: float = 0.0
    """Price of one GPU for an hour, in any currency; 0: no cost is printed."""

    data_hours: float = 1000.0
    """Hours of audio in the data, to compute the number of epochs."""

    json: bool = False
    """Print JSON instead of text."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)


def run(options: Options) -> int:
    """Prints a plan. Returns the exit status."""
    if not options.config:
        raise InputError("titan-tts plan needs a config, for example: titan-tts plan 800m")
    for name in ("gpus", "gpus_per_node", "inter_node_gbps", "price"):
        check_range(f"--{name.replace('_', '-')}", getattr(options, name), 0, 10**6)
    check_range("--data-hours", options.data_hours, 1e-3, 10**9)
    path = find_config(options.config)
    # torch takes seconds to import.
    from titan_tts.plan.devices import ACCELERATOR, Cluster, check_device, find_device, with_peak
    from titan_tts.plan.forecast import Planner, compare_layouts
    from titan_tts.plan.report import layout_lines, report_lines, values
    from torchtitan.models.dit_tts.config.checks import validate_config
    from torchtitan.models.dit_tts.config.manager import TTSConfigManager, resolve
    from torchtitan.models.dit_tts.errors import quiet_known_warnings
    from torchtitan.models.dit_tts.model_config import model_flavors
    from torchtitan.models.dit_tts.run.teacher import with_teacher

    quiet_known_warnings()
    device = find_device(options.gpu)
    given = TTSConfigManager().parse_args([f"--job.config_file={path}", *options.config_args])
    config = with_teacher(resolve(given))
    device = with_peak(device, config)
    in_node = options.gpus_per_node or device.gpus_per_node
    cluster = Cluster.of(device, options.gpus or in_node, in_node, options.inter_node_gbps)
    validate_config(config, cluster.gpus, list(model_flavors()), ACCELERATOR)
    check_device(config, device)
    planner = Planner(config, cluster)
    run = planner.run()
    compared = cluster.gpus > 1 and config.training.global_batch_size > 0
    choices = compare_layouts(planner, config) if compared else []
    if options.json:
        print(json.dumps(values(run, choices), indent=1))
        return 0
    lines = report_lines("plan", planner, run, options.data_hours, options.price)
    print("\n".join([*lines, *(layout_lines(choices) if compared else [])]))
    return 0
