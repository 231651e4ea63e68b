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
        (1, ["cuda:0", "cuda:1"], "local", 2),
    ],
)
def test_default_workers(jobs, devices, engine, workers, monkeypatch):
    monkeypatch.setattr(executors.os, "sched_getaffinity", lambda pid: range(64))
    assert executors.default_workers(jobs, devices, engine) == workers


def test_a_worker_killed_before_all_jobs_are_given_is_one_sentence(monkeypatch):
    class Broken(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, workers, *args):
            super().__init__(workers)

        def submit(self, *args):
            raise BrokenProcessPool

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Broken)
    with executors.open_engine("local", 2, ["cpu"]) as runner:
        words = "worker process was killed", "than --workers 2"
        refused(lambda: list(runner("encode:encode_chunk", [("folder", 0)])), *words)
