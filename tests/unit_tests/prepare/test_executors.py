"""Processes: how many by default, and one that is killed."""

import pytest

from titan_tts.prepare import executors


@pytest.mark.parametrize(
    "jobs, devices, engine, workers",
    [
        (0, ["cpu"], "local", 1),
        (320, ["cpu"], "local", 10),
        (1, ["cuda:0", "cuda:1"], "local", 2),
    ],
)
def test_default_workers(jobs, devices, engine, workers, monkeypatch):
    monkeypatch.setattr(executors.os, "sched_getaffinity", lambda pid: range(64))
    assert executors.default_workers(jobs, devices, engine) == workers
