"""`titan-tts plan`: memory, time and MFU of a run before it starts, on any CPU."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError, check_range
from torchtitan.models.dit_tts.files import check_writable


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

    suggest: bool = False
    """Compare layouts, checkpointing and micro-batches instead: which are fastest, and why others lose. Takes minutes."""

    out: Path | None = None
    """With --suggest: write a TOML file of the config with the best layout, which `titan-tts train` takes."""

    json: bool = False
    """Print JSON instead of text."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)


def run(options: Options) -> int:
    """Prints a plan. Returns the exit status."""
    if not options.config:
        raise InputError("titan-tts plan needs a config, for example: titan-tts plan 800m")
    check_range("--gpus", options.gpus, 0, 10**6)
    check_range("--gpus-per-node", options.gpus_per_node, 0, 10**6)
    check_range("--inter-node-gbps", options.inter_node_gbps, 0, 10**6)
    check_range("--price", options.price, 0, 10**6)
    check_range("--data-hours", options.data_hours, 1e-3, 10**9)
    if options.out and (not options.suggest or options.out.exists()):
        why = "exists; give another file" if options.suggest else "needs --suggest"
        raise InputError(f"--out {options.out} {why}")
    if options.out:
        check_writable(options.out, "--out")
    path = find_config(options.config)
    # torch takes seconds to import.
    from titan_tts.plan.devices import ACCELERATOR, Cluster, find_device, with_peak
    from titan_tts.plan.plan import make_plan
    from titan_tts.plan.report import plan_lines
    from titan_tts.plan.step_time import GUESS
    from titan_tts.plan.suggest import suggest, suggestion_lines, write_suggestion
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
    result: Any
    if options.suggest:
        result = suggest(config, cluster, GUESS)
        if options.out:
            write_suggestion(options.out, given, result, cluster)
        lines = suggestion_lines(result, cluster)
    else:
        validate_config(config, cluster.gpus, list(model_flavors()), ACCELERATOR)
        result = make_plan(config, cluster, GUESS, options.price)
        lines = plan_lines(result, options.data_hours)
    if options.json:
        lines = [json.dumps(dataclasses.asdict(result), indent=1, default=str)]
    print("\n".join(lines))
    return 0
