"""`titan-tts plan`: memory, time and MFU of a run before it starts, on any CPU."""

import argparse
import dataclasses
import json
from pathlib import Path

from torchtitan.models.dit_tts.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        help="TOML file of the run; after it, --section.key value as in training",
    )
    parser.add_argument("--gpu", default="H200", help="A100, H100, H100 PCIe, H200, ...")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument(
        "--inter-node-gbps",
        type=float,
        help="GB/s between one node and the others, in one direction; default: 50 per GPU, a guess",
    )
    parser.add_argument(
        "--grid", action="store_true", help="rank layouts, checkpointing, compile, micro-batches"
    )
    parser.add_argument(
        "--factors", type=Path, help="file of measured factors; default: the user's, else a guess"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="measure a GPU's factor from ended runs (folders or plan.json) and save it to --factors",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(config_args=[])


def run(options: argparse.Namespace) -> int:
    """Raises InputError where config, GPU or files do not allow a plan."""
    from torchtitan.models.dit_tts.errors import quiet_known_warnings

    quiet_known_warnings()
    if options.calibrate:
        from torchtitan.models.dit_tts.plan.compare import calibrate, factors_file

        path = options.factors or factors_file()
        for device, factor in calibrate(options.calibrate, path).items():
            print(f"{device}: factor {factor.value:.3f} +- {factor.error:.0%}, {factor.origin}")
        print(f"saved to {path}")
        return 0
    if options.config is None:
        raise InputError(
            "titan-tts plan needs a config file, for example train_configs/dit_tts_800m.toml"
        )
    return _plan(options)


def _plan(options: argparse.Namespace) -> int:
    from torchtitan.models.dit_tts import model_flavors
    from torchtitan.models.dit_tts.config.checks import validate_config
    from torchtitan.models.dit_tts.config.manager import load_config
    from torchtitan.models.dit_tts.plan.compare import load_factor
    from torchtitan.models.dit_tts.plan.devices import (
        ACCELERATOR,
        cluster_of,
        find_device,
        with_peak,
    )
    from torchtitan.models.dit_tts.plan.grid import grid
    from torchtitan.models.dit_tts.plan.plan import make_plan
    from torchtitan.models.dit_tts.plan.report import grid_lines, plan_lines

    for name in ("gpus_per_node", "nodes", "inter_node_gbps"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} {value} must be greater than 0")
    device = find_device(options.gpu)
    config = load_config([f"--job.config_file={options.config}", *options.config_args])
    cluster = cluster_of(
        with_peak(device, config),
        options.gpus_per_node * options.nodes,
        options.gpus_per_node,
        options.inter_node_gbps and options.inter_node_gbps * 1e9,
    )
    validate_config(config, cluster.gpus, list(model_flavors()), ACCELERATOR)
    factor = load_factor(options.factors, device.name)
    if options.grid:
        choices = grid(config, cluster, factor)
        content = [dataclasses.asdict(choice) for choice in choices]
        lines = grid_lines(choices, cluster, factor)
    else:
        plan = make_plan(config, cluster, factor)
        content, lines = [dataclasses.asdict(plan)], plan_lines(plan)
    # A grid is a list, a plan an object.
    text = json.dumps(content if options.grid else content[0], indent=1, default=str)
    print(text if options.json else "\n".join(lines))
    return 0
