"""Power, utilisation and memory of this process's GPU, from NVIDIA's management library (NVML)."""

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GpuUse:
    """Use of one GPU by all processes."""

    power_watts: float
    """mean since the last reading; momentary on GPUs without an energy counter"""
    utilization: float
    """fraction of the last second or less in which any kernel ran"""
    memory_used_gib: float


class GpuMonitor:
    """Reads torch's current GPU, if there are NVIDIA's driver and the package nvidia-ml-py."""

    def __init__(self) -> None:
        self._device: Any = None
        self._energy: tuple[float, float] | None = None
        if not torch.cuda.is_available():
            return
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        # NVML numbers all GPUs of the machine, torch the visible ones.
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        try:
            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:  # no driver, or a part of a GPU (MIG)
            pass

    def read(self) -> GpuUse | None:
        if self._device is None:
            return None
        try:
            return GpuUse(
                self._power_watts(),
                self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100,
                self._nvml.nvmlDeviceGetMemoryInfo(self._device).used / 2**30,
            )
        except self._nvml.NVMLError:
            return None

    def _power_watts(self) -> float:
        try:
            joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device) / 1000
        except self._nvml.NVMLError:  # before Volta
            return self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1000
        before, self._energy = self._energy, (joules, time.perf_counter())
        if before is None:
            return self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1000
        return (joules - before[0]) / (self._energy[1] - before[1])
