"""`titan-tts collect` with an analysis of no time, its worker in this process. Fixtures: `source`, `output`,
`collect`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile

from titan_tts import cli
from titan_tts.collect import worker
from titan_tts.jobs import engines
from tools.harness.stand_in_analyzer import RATE, write_recordings

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

    start = engines.open_engine

    def open_engine(name, workers, devices, here):
        assert (name, devices, here) == ("local", ["cpu"], False)
        return start(name, 1, devices)

    monkeypatch.setattr(engines, "open_engine", open_engine)
    worker._analyzer.cache_clear()

    def collect(source: object, output: object, *options: str) -> int:
        analyzer = () if "--analyzer" in options else ("--analyzer", STAND_IN)
        return cli.main(["collect", str(source), str(output), *analyzer, *options])

    return collect


def read_rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "collection.jsonl").open(encoding="utf-8")]


def complete(output: Path) -> set[str]:
    """Ids of the recordings whose folders are there."""
    return {path.name for path in (output / "files").glob("*")}


def seconds(path: Path) -> int:
    return len(soundfile.read(path)[0]) // RATE


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}
