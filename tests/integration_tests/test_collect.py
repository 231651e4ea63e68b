"""`titan-tts collect` as it runs: processes that are killed, and what follows."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import speech_corpora as corpora
from tests.helpers.collecting import STAND_IN, complete, read_rows, tree
from titan_tts.launch.supervisor import descendants
from tools.harness import forked
from tools.harness.stand_in_analyzer import write_recordings
from torchtitan.models.dit_tts.data.dataset import open_dataset


@pytest.fixture
def source(tmp_path) -> Path:
    write_recordings(tmp_path / "source", 8)
    return tmp_path / "source"


def start(source: Path, output: Path, milliseconds: int, *options: str) -> forked.Child:
    analyzer = ("--analyzer", f"{STAND_IN}:{milliseconds}")
    return forked.start_titan_tts(
        "collect", source, output, *analyzer, *options, log=output.with_suffix(".log")
    )


def test_killed_workers_change_no_byte_and_prepare_takes_what_they_made(source, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(source, whole, 0).wait() == 0
    running = start(source, killed, 200, "--workers", "2")
    while not list((killed / "files").glob("*")):
        assert running.poll() is None
        time.sleep(0.01)
    os.kill(max(descendants(running.pid)), signal.SIGKILL)  # a worker: it is replaced
    assert running.wait() == 0, forked.tail(killed.with_suffix(".log"))
    assert len(complete(killed)) == 8
    # The other analyzer is another setting, but it says the same.
    assert tree(killed / "files") == tree(whole / "files")
    rows = {row["id"]: row for row in read_rows(killed)}
    assert [*rows.values()] == read_rows(whole)
    corpora.prepare(killed / "collection.jsonl", tmp_path / "data")
    dataset = open_dataset([str(tmp_path / "data/train")], corpora.CHANNELS)
    assert len(dataset) == len(rows)
    for sample in map(dataset.metadata, range(len(dataset))):
        row = {name: value for name, value in rows[sample["id"]].items() if value is not None}
        assert row.items() <= sample.items()
