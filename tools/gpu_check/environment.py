"""Stage: what the figures were measured on."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch
from torchtitan.tools import utils

from tools.gpu_check.items import Item, NotMeasured, Values
from tools.gpu_check.settings import Settings

_QUERIED = (  # nvidia-smi's names, with their units
    "driver_version",
    "power.limit",
    "power.draw",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "memory.total",
    "memory.used",
    "clocks_event_reasons.active",
    "persistence_mode",
    "ecc.mode.current",
)
_PACKAGES = (
    "torch",
    "torchtitan",
    "torchao",
    "triton",
    "numpy",
    "transformers",
    "transformer-engine",
    "datasets",
    "tyro",
)


def items(settings: Settings) -> list[Item]:
    return [
        Item("software", software),
        Item("device", lambda: device(settings)),
        Item("driver and clocks", lambda: driver(settings)),
    ]


def software() -> Values:
    values: Values = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            values[package] = version(package)
        except PackageNotFoundError:
            values[package] = "absent"
    values["cuda"] = str(torch.version.cuda)
    if torch.cuda.is_available():
        values["cudnn"] = str(torch.backends.cudnn.version())
    return values


def device(settings: Settings) -> Values:
    values: Values = {"name": utils.device_module.get_device_name(), "cpus": os.cpu_count() or 0}
    if settings.device == "cpu":
        total = utils.device_module.get_device_properties().total_memory
        return {**values, "threads": torch.get_num_threads(), "memory_gib": total / 2**30}
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    return {
        **values,
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": total / 2**30,
        "free_memory_gib": free / 2**30,
    }


def driver(settings: Settings) -> Values:
    if settings.device == "cpu":
        raise NotMeasured("no GPU is used")
    command = [
        "nvidia-smi",
        "-i",
        "0",
        f"--query-gpu={','.join(_QUERIED)}",
        "--format=csv,noheader",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(f"nvidia-smi: {error}") from error
    if answer.returncode:
        raise NotMeasured(f"nvidia-smi: {(answer.stderr or answer.stdout).strip()[:200]}")
    return dict(zip(_QUERIED, map(str.strip, answer.stdout.strip().split(","))))
