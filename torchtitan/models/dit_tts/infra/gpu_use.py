"""Power, utilisation and memory of this process's GPU, from its vendor's management library."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuUse:
    """Use of one GPU by all processes."""

    power_watts: float
    """mean of about a second"""
    utilization: float
    """fraction of the last second or less in which any kernel ran"""
    memory_used_gib: float


def read_gpu() -> GpuUse | None:
    """Reads torch's current GPU; None without one, its driver, or the library's package (nvidia-ml-py)."""
    if not torch.cuda.is_available():
        return None
    try:
        return GpuUse(
            torch.cuda.power_draw() / 1000,
            torch.cuda.utilization() / 100,
            torch.cuda.device_memory_used() / 2**30,
        )
    except (
        Exception
    ):  # the libraries have errors of their own; figures of use are no reason to end a run
        return None
