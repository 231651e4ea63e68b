"""Power, utilisation and memory of a GPU, in their units, or nothing."""

import torch

from torchtitan.models.dit_tts.infra.gpu_use import GpuUse, read_gpu


def test_the_units_and_what_a_missing_package_or_driver_gives(monkeypatch):
    values = {"power_draw": 250_000, "utilization": 75, "device_memory_used": 3 * 2**30}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert read_gpu() is None  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert read_gpu() == GpuUse(power_watts=250.0, utilization=0.75, memory_used_gib=3.0)

    def missing():
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert read_gpu() is None
