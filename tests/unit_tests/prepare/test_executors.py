"""Processes: how many by default, and one that is killed."""

import concurrent.futures
from concurrent.futures.process import BrokenProcessPool

import pytest

from tests.helpers.sentences import refused
from titan_tts.prepare import executors


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
    monkeypatch.setattr(executors.os, "sched_getaffinity", lambda pid: range(64))
    assert executors.default_workers(jobs, devices, engine) == workers


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
    assert executors.codec_devices(device, engine) == devices


def test_a_worker_killed_before_all_jobs_are_given_is_one_sentence(monkeypatch):
    class Broken(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, workers, context, start, arguments):
            super().__init__(workers)
            started.append([arguments[1].get() for _ in range(workers)])

        def submit(self, *args):
            raise BrokenProcessPool

    started = []
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Broken)
    with executors.open_engine("local", 2, ["cpu"]) as runner:
        words = "worker process was killed", "than --workers 2"
        refused(lambda: list(runner("prepare.encode:encode_chunk", [("folder", 0)])), *words)
    for workers in (1, 3):  # each device has a process, and they take turns
        with executors.open_engine("local", workers, ["cuda:0", "cuda:1"]):
            pass
    assert started == [["cpu"] * 2, ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1", "cuda:0"]]
