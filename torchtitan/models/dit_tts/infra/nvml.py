"""Power, utilisation and memory of this process's GPU, as NVIDIA's management library (NVML) gives them."""

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GpuUse:
    """Of one GPU, by all processes on it."""

    power_watts: float
    """mean since the reading before; on GPUs without a counter of energy that of the moment"""
    utilization: float
    """fraction of the last second or less in which any kernel ran"""
    memory_used_gib: float


class GpuMonitor:
    """Reads the GPU that is torch's current device. Without NVIDIA's driver or the package nvidia-ml-py
    there is nothing to read."""

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
        # NVML counts all GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES.
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        try:
            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:  # no driver, or a part of a GPU (MIG)
            pass

    def read(self) -> GpuUse | None:
        """What the GPU does; None where that is not known."""
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
