"""`titan-tts collect` with an analysis of no time, its worker in this process. Fixtures: `source`, `output`,
`collect`."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import soundfile

from titan_tts import cli
from titan_tts.collect import run_workers
from titan_tts.collect.queue import Queue, open_queue
from titan_tts.collect.worker import Unsound, work
from tools.harness.stand_in_analyzer import RATE, write_recordings
from torchtitan.models.dit_tts.errors import InputError

STAND_IN = "tools.harness.stand_in_analyzer:stand_in"
COUNT = 6
"""recordings of `source`"""


@pytest.fixture
def source(tmp_path) -> Path:
    write_recordings(tmp_path / "source", COUNT)
    return tmp_path / "source"


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def collect(monkeypatch) -> Callable[..., int]:
    """collect(source, output, *options): the exit status."""

    def run_here(job, devices, count, queue, watch):
        assert devices == ["cpu"]
        try:
            while True:
                with suppress(Unsound):
                    return work(job, "worker", devices[0])
                watch()
        except InputError:
            queue.release_claims("worker")
            raise

    monkeypatch.setattr(run_workers, "run_here", run_here)

    def collect(source: object, output: object, *options: str) -> int:
        analyzer = () if "--analyzer" in options else ("--analyzer", STAND_IN)
        return cli.main(["collect", str(source), str(output), *analyzer, *options])

    return collect


def read_rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "collection.jsonl").open(encoding="utf-8")]


def queue_of(output: Path) -> Queue:
    return open_queue("", output, "unused")


def analyzed_jobs(output: Path) -> set[str]:
    return {job for job, row in queue_of(output).jobs().items() if row.seconds}


def seconds(path: Path) -> int:
    return len(soundfile.read(path)[0]) // RATE


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}
