"""How many processes run on which devices by default."""

import pytest

from titan_tts.jobs import devices as jobs_devices


@pytest.mark.parametrize(
    "jobs, devices, engine, workers",
    [
        (0, ["cpu"], "local", 1),
        (320, ["cpu"], "local", 10),
        (10_000, ["cpu"], "local", 64),
        (1, ["cuda:0", "cuda:1"], "local", 2),
        (10_000, ["cuda:0", "cuda:1"], "local", 8),  # four per GPU
        (10_000, ["cuda:0"], "ray", 64),
    ],
)
def test_default_workers(jobs, devices, engine, workers, monkeypatch):
    monkeypatch.setattr(jobs_devices.os, "sched_getaffinity", lambda pid: range(64))
    assert jobs_devices.default_workers(jobs, devices, engine) == workers


@pytest.mark.parametrize(
    "device, engine, gpus, devices",
    [
        ("auto", "local", 0, ["cpu"]),
        ("auto", "local", 2, ["cuda:0", "cuda:1"]),
        ("cuda", "local", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1, cpu", "local", 2, ["cuda:1", "cpu"]),
        ("cuda:1", "ray", 0, ["cuda:0"]),
    ],
)
def test_devices(device, engine, gpus, devices, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert jobs_devices.codec_devices(device, engine) == devices
