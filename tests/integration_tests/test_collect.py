"""`titan-tts collect` as it runs: processes that are killed, several machines on one queue, Ray, and what follows."""

import random
from pathlib import Path

import pytest

from benchmarks.collect_kills import Collecting
from tests.helpers import speech_corpora as corpora
from tests.helpers.collecting import STAND_IN, read_rows
from tests.helpers.postgres import postgres  # noqa: F401
from tools.harness import forked
from tools.harness.stand_in_analyzer import write_recordings
from torchtitan.models.dit_tts.data.dataset import open_dataset


def start(arguments: list[str], log: Path) -> forked.Child:
    return forked.start_titan_tts(*arguments, log=log)


@pytest.fixture
def source(tmp_path) -> Path:
    write_recordings(tmp_path / "source", 8)
    return tmp_path / "source"


def test_killed_workers_change_no_byte_and_prepare_takes_what_they_made(source, tmp_path):
    expected = Collecting(source, tmp_path / "whole", start=start).finish()
    killed = Collecting(source, tmp_path / "killed", start=start)
    assert killed.kill_once(random.Random(1))
    assert killed.finish() == expected
    assert killed.counts() == {"pending": 0, "claimed": 0, "done": 8, "dead": 0}
    rows = {row["id"]: row for row in read_rows(killed.output)}
    corpora.prepare(killed.output / "collection.jsonl", tmp_path / "data")
    dataset = open_dataset([str(tmp_path / "data/train")], corpora.CHANNELS)
    assert len(dataset) == len(rows)
    for sample in map(dataset.metadata, range(len(dataset))):
        row = {name: value for name, value in rows[sample["id"]].items() if value is not None}
        assert row.items() <= sample.items()


def test_two_machines_share_a_queue(source, tmp_path, postgres):  # noqa: F811
    both = [Collecting(source, tmp_path / "out", postgres, start) for _ in range(2)]
    for number, each in enumerate(both):
        each.log = tmp_path / f"{number}.log"
    running = [each.start() for each in both]
    assert forked.wait_for_all(running, 120) == 0, [each.log.read_text() for each in both]
    assert both[0].counts() == {"pending": 0, "claimed": 0, "done": 8, "dead": 0}
    alone = Collecting(source, tmp_path / "alone", start=start)
    assert both[0].finish() == alone.finish()


def test_a_second_command_in_the_same_folder_is_refused(source, tmp_path):
    slow = Collecting(source, tmp_path / "out", start=start)
    slow._arguments += ["--workers", "1"]
    first = slow.start()
    try:
        while not (tmp_path / "out/queue.sqlite").exists():
            assert first.poll() is None
        ended = forked.titan_tts("collect", source, tmp_path / "out", "--analyzer", STAND_IN)
        assert ended.returncode == 2 and "another titan-tts collect is at work" in ended.stderr
    finally:
        first.kill()


def test_workers_that_never_get_a_job_end_the_command(source, tmp_path):
    ended = forked.titan_tts("collect", source, tmp_path / "out", "--analyzer", "no.module:here")
    assert (
        ended.returncode == 2 and "the analyzer 'no.module:here' cannot be imported" in ended.stderr
    )
