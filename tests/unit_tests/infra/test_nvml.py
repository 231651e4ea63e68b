"""Power, utilisation and memory of the GPU, from a fake of NVIDIA's library."""

import sys
from types import SimpleNamespace

import pytest
import torch

from torchtitan.models.dit_tts.infra import nvml
from torchtitan.models.dit_tts.infra.nvml import GpuMonitor, GpuUse


class Nvml:
    """The module pynvml on a machine with two GPUs, which have UUIDs."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.energy_millijoules: int | None = 5_000_000
        self.present = True

    def nvmlInit(self):
        if not self.present:
            raise self.NVMLError("library not found")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-aaaa": "first", "GPU-bbbb": "second"}[uuid]

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        if self.energy_millijoules is None:
            raise self.NVMLError("not supported")
        return self.energy_millijoules

    def nvmlDeviceGetPowerUsage(self, device):
        return {"first": 100_000, "second": 250_000}[device]

    def nvmlDeviceGetUtilizationRates(self, device):
        if not self.present:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu={"first": 10, "second": 75}[device])

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=3 * 2**30)


@pytest.fixture
def library(monkeypatch) -> Nvml:
    """torch sees the second GPU alone."""
    made, second = Nvml(), SimpleNamespace(uuid="bbbb")
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: second)
    return made


def test_power_is_the_mean_since_the_last_reading(library, monkeypatch):
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(nvml, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monitor = GpuMonitor()
    assert monitor.read() == GpuUse(power_watts=250.0, utilization=0.75, memory_used_gib=3.0)
    for joules, seconds in ((600, 2.0), (100, 1.0)):
        clock.now += seconds
        library.energy_millijoules += joules * 1000
        assert monitor.read().power_watts == joules / seconds
    library.energy_millijoules = None  # an old GPU counts no energy
    assert monitor.read().power_watts == 250.0


def test_a_gpu_package_or_driver_that_is_missing_or_lost_gives_no_figures(library, monkeypatch):
    monitor = GpuMonitor()
    library.present = False
    assert monitor.read() is None and GpuMonitor().read() is None
    library.present = True
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)  # importing it fails
        assert GpuMonitor().read() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert GpuMonitor().read() is None
