"""Number of workers, their devices, and the versions of libraries that results may depend on."""

import os
from importlib.metadata import version

from torchtitan.models.dit_tts.errors import InputError

# Packages of the speech extra; the bytes of what is made may depend on their versions.
LIBRARIES = ("soundfile", "soxr", "pyloudnorm", "av", "pyarrow")
# Starting a process takes as long as this many chunks of a light codec.
JOBS_WORTH_A_PROCESS = 32
# More would wait for the GPU, each with a codec of its own in its memory.
MAX_PROCESSES_PER_GPU = 4


def cores() -> int:
    """Cores that this process may use; all of the machine's where the system has no affinity, as on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers(jobs: int, devices: list[str], engine: str = "local") -> int:
    """Processes for this many short jobs: at most one per core, at least one per device."""
    limit = cores()
    if devices[0] != "cpu" and engine == "local":  # Ray gives each job a GPU of its own
        limit = min(limit, MAX_PROCESSES_PER_GPU * len(devices))
    return max(len(devices), min(limit, jobs // JOBS_WORTH_A_PROCESS), 1)


def codec_devices(device: str, engine: str = "local") -> list[str]:
    """The devices of `--device`: "auto" is every GPU, or the CPU; "cuda" every GPU."""
    import torch

    if engine == "ray" and device.startswith("cuda"):
        return ["cuda:0"]  # Ray deals out the cluster's GPUs; this machine need not have one
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if device == "auto":
        return gpus or ["cpu"]
    devices = gpus if device == "cuda" and gpus else [name.strip() for name in device.split(",")]
    for name in devices:
        if name != "cpu" and name not in gpus:
            there = ", ".join(["cpu", *gpus])
            raise InputError(f"--device names {name!r}; this machine has {there}")
    return devices


def library_versions() -> dict[str, str]:
    """Versions of the packages on which the bytes of what is made may depend."""
    return {name: version(name) for name in ("torch", "numpy", "scipy", *LIBRARIES)}
