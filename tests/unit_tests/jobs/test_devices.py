"""Which devices are taken, and how many processes run on them by default."""

import pytest

from titan_tts.jobs import engines


@pytest.mark.parametrize(
    "device, engine, gpus, devices, jobs, workers",
    [
        ("auto", "local", 0, ["cpu"], 0, 1),
        ("auto", "local", 0, ["cpu"], 320, 10),
        ("cpu", "local", 2, ["cpu"], 10_000, 64),
        ("auto", "local", 2, ["cuda:0", "cuda:1"], 1, 2),
        ("cuda", "local", 2, ["cuda:0", "cuda:1"], 10_000, 8),  # four per GPU
        ("cuda:1, cpu", "local", 2, ["cuda:1", "cpu"], 10_000, 8),
        ("cuda:1", "ray", 0, ["cuda:0"], 10_000, 64),
    ],
)
def test_devices_and_workers(device, engine, gpus, devices, jobs, workers, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(engines.os, "sched_getaffinity", lambda pid: range(64))
    assert engines.codec_devices(device, engine) == devices
    assert engines.default_workers(jobs, devices, engine) == workers


def test_macos_which_has_no_affinity_counts_all_cores(monkeypatch):
    monkeypatch.delattr(engines.os, "sched_getaffinity")
    monkeypatch.setattr(engines.os, "cpu_count", lambda: 9)
    assert engines.cores() == 9
