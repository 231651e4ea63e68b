"""A run's folder: files that are whole whenever a process dies, and a config that can be read back."""

import json
import os
import threading

import pytest

from torchtitan.models.dit_tts import run_folder
from torchtitan.models.dit_tts.config import load_config
from torchtitan.models.dit_tts.run_folder import LineFile, RunFolder, write_atomic


def files_below(folder) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# Whole files


def test_write_atomic_makes_folders_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a" / "b" / "state.json"
    write_atomic(path, "old ü")
    write_atomic(path, b"new \xff")
    assert path.read_bytes() == b"new \xff"
    assert files_below(tmp_path) == ["a/b/state.json"]


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch, at):
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder.os, at, full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert files_below(tmp_path) == ["state.json"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "state.json"
    contents = {letter * 200_000 for letter in "abc"}
    write_atomic(path, "a" * 200_000)
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            seen.append(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for content in contents:
            write_atomic(path, content)
    done.set()
    reader.join()
    assert seen and set(seen) <= contents


def rows(*steps: int) -> list[dict]:
    return [{"step": step, "loss": 1.5 * step, "ids": [f"ü{step}"]} for step in steps]


@pytest.fixture
def lines(tmp_path) -> LineFile:
    file = LineFile(tmp_path / "audit" / "rank0.jsonl")
    assert file.read() == []
    for row in rows(1, 2, 3, 4):
        file.append(row)
    return file


def test_lines_read_back(lines):
    assert lines.read() == rows(1, 2, 3, 4)
    assert lines.path.read_bytes().count(b"\n") == 4


@pytest.mark.parametrize("cut", [1, 2, 10, "all of the line"])
def test_a_torn_last_line_is_left_out(lines, cut):
    whole = lines.path.read_bytes()
    last = len(whole) - whole.rindex(b"\n", 0, -1) - 1
    os.truncate(lines.path, len(whole) - (last if cut == "all of the line" else cut))
    assert lines.read() == rows(1, 2, 3)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("step", [0, 2, 4, 9])
def test_keep_until(lines, step, torn):
    if torn:
        with open(lines.path, "ab") as file:
            file.write(b'{"step": 5, "lo')
    lines.keep_until(step)
    kept = rows(*range(1, min(step, 4) + 1))
    assert lines.read() == kept
    lines.append({"step": step + 1})  # after a torn line this must start a line of its own
    assert lines.read() == [*kept, {"step": step + 1}]


def test_keep_until_without_a_file(tmp_path):
    file = LineFile(tmp_path / "none.jsonl")
    file.keep_until(3)
    assert files_below(tmp_path) == []


# The folder


SETTINGS = [
    '--job.description=quotes " and \' and \\ and ü\nand a second line',
    "--model.flavor=800M",
    "--data.path=data/*.tar",
    "--data.bucket_frames", "64", "128",
    "--optimizer.lr=3e-4",
    "--ema.decay=0.9995",
    "--objective.prediction=noise",
    "--objective.loss_on_padding",
    "--checkpoint.no-enable",
    "--checkpoint.initial_load_path=somewhere",
    "--checkpoint.exclude_from_loading=dataloader,optimizer",
    "--training.global_batch_size=-1",
    "--debug.seed=5",
]  # fmt: skip


@pytest.mark.parametrize("arguments", [[], SETTINGS], ids=["defaults", "settings"])
def test_config_reads_back_equal(tmp_path, arguments):
    config = load_config(["--job.experiment=x", *arguments])
    folder = RunFolder(tmp_path / "x", rank=0)
    folder.start(config)
    again = load_config(["--job.config_file", str(tmp_path / "x" / "config.toml")])
    assert again.job.config_file != config.job.config_file
    again.job.config_file = config.job.config_file
    assert again == config
    assert (again == load_config(["--job.experiment=x"])) == (not arguments)


def test_start_writes_config_environment_and_state(tmp_path):
    RunFolder(tmp_path, rank=0).start(load_config([]))
    assert files_below(tmp_path) == ["config.toml", "env.json", "state.json"]
    environment = json.loads((tmp_path / "env.json").read_text())
    assert environment["versions"]["torchtitan"] == "0.2.2"
    assert environment["versions"]["torch"] and environment["device"] and environment["command"]
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["state"], state["step"], state["pid"]) == ("init", 0, os.getpid())


def test_an_earlier_config_stays_until_the_new_life_works(tmp_path):
    folder = RunFolder(tmp_path, rank=0)
    folder.start(load_config(["--training.steps=5"]))
    folder.set_state("completed", 5)
    before = (tmp_path / "config.toml").read_text()
    later = load_config(["--training.steps=9"])
    folder.start(later)
    assert (tmp_path / "config.toml").read_text() == before
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "init"
    folder.set_state("running", 5)
    folder.start(later, replace=True)
    assert "steps = 9" in (tmp_path / "config.toml").read_text()
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "running"


def test_only_the_first_rank_writes_but_for_its_audit(tmp_path):
    folder = RunFolder(tmp_path, rank=1)
    folder.start(load_config([]))
    folder.set_state("running", 3)
    folder.resume_at(0)
    assert files_below(tmp_path) == []
    folder.audit.append({"step": 1, "ids": []})
    assert files_below(tmp_path) == ["audit/rank1.jsonl"]


def test_resume_brings_every_line_file_back(tmp_path):
    folders = [RunFolder(tmp_path, rank) for rank in range(2)]
    for folder in folders:
        for row in rows(1, 2, 3):
            folder.audit.append(row)
    for row in rows(1, 2, 3):
        folders[0].metrics.append(row)
    folders[1].resume_at(1)  # the first rank does it for all
    assert folders[0].metrics.read() == rows(1, 2, 3)
    folders[0].resume_at(2)
    for file in (folders[0].metrics, folders[0].audit, folders[1].audit):
        assert file.read() == rows(1, 2)


@pytest.mark.parametrize("state", run_folder.STATES)
def test_states(tmp_path, state):
    folder = RunFolder(tmp_path, rank=0)
    folder.set_state(state, 7, error="no room")
    found = json.loads((tmp_path / "state.json").read_text())
    assert (found["state"], found["step"], found["error"]) == (state, 7, "no room")
    with pytest.raises(AssertionError):
        folder.set_state("done", 7)
