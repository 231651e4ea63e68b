"""`titan-tts plan`: time, memory and MFU of a run before it starts, on any CPU."""

import argparse
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
    parser.add_argument("--gpu", default="H200", help="its name: A100, H100, H100 PCIe, H200, ...")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument(
        "--inter-node-gbps",
        type=float,
        help="GB/s of a node to the others in one direction; default 50 a GPU, a guess",
    )
    parser.add_argument(
        "--grid", action="store_true", help="ranks layouts, checkpointing, compile, micro-batches"
    )
    parser.add_argument(
        "--constants", type=Path, help="file of constants; default: the user's, else guesses"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="RESULTS.json",
        help="fits the constants to measured runs (benchmark.json) and saves them; needs no config",
    )
    parser.add_argument(
        "--out", type=Path, help="where --calibrate saves; default: the user's file"
    )
    parser.add_argument("--json", action="store_true", help="prints JSON instead of text")
    parser.set_defaults(config_args=[])


def run(options: argparse.Namespace) -> int:
    """Raises InputError where config, GPU or files do not allow a plan."""
    from torchtitan.models.dit_tts.errors import quiet_known_warnings

    quiet_known_warnings()
    if options.calibrate is not None:
        return _calibrate(options)
    if options.config is None:
        raise InputError(
            "titan-tts plan needs a config file, for example train_configs/dit_tts_800m.toml"
        )
    return _plan(options)


def _calibrate(options: argparse.Namespace) -> int:
    from torchtitan.models.dit_tts.plan.calibrate import calibrate
    from torchtitan.models.dit_tts.plan.constants import save, user_file
    from torchtitan.models.dit_tts.plan.forecast_report import calibration_lines

    found = calibrate(options.calibrate)
    path = options.out or user_file()
    for device, calibration in found.items():
        print("\n".join(calibration_lines(device, calibration)))
        save(path, device, calibration.constants)
    print(f"saved to {path}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from torchtitan.models.dit_tts import model_flavors
    from torchtitan.models.dit_tts.config.checks import validate_config
    from torchtitan.models.dit_tts.config.manager import load_config
    from torchtitan.models.dit_tts.plan.constants import load
    from torchtitan.models.dit_tts.plan.devices import (
        ACCELERATOR,
        cluster_of,
        find_device,
        with_peak,
    )
    from torchtitan.models.dit_tts.plan.forecast import forecast
    from torchtitan.models.dit_tts.plan.forecast_report import (
        as_json,
        forecast_lines,
        grid_lines,
    )
    from torchtitan.models.dit_tts.plan.grid import grid

    for name in ("gpus_per_node", "nodes"):
        if getattr(options, name) < 1:
            raise InputError(
                f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1"
            )
    if options.inter_node_gbps is not None and options.inter_node_gbps <= 0:
        raise InputError(f"--inter-node-gbps {options.inter_node_gbps} must be greater than 0")
    device = find_device(options.gpu)
    between = options.inter_node_gbps and options.inter_node_gbps * 1e9
    config = load_config([f"--job.config_file={options.config}", *options.config_args])
    cluster = cluster_of(
        with_peak(device, config),
        options.gpus_per_node * options.nodes,
        options.gpus_per_node,
        between,
    )
    validate_config(config, cluster.gpus, list(model_flavors()), ACCELERATOR)
    constants = load(options.constants, device.name)
    if options.grid:
        choices = grid(config, cluster, constants)
        said = choices if options.json else grid_lines(choices, cluster, constants)
    else:
        planned = forecast(config, cluster, constants)
        said = planned if options.json else forecast_lines(planned)
    print(json.dumps(as_json(said), indent=1) if options.json else "\n".join(said))
    return 0
