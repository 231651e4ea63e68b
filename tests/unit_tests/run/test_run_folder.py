"""The run folder: its state, its line files, and who writes."""

import json
import os
import tomllib

import pytest
import torch

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import LOST_PEER, InputError, failure_state
from torchtitan.models.dit_tts.run.run_folder import RunFolder

SECRET = "s3cr3t"


def rows(*steps: int) -> list[dict]:
    return [{"step": step, "ids": [f"ü{step}"]} for step in steps]


def files_below(folder) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def state_of(folder) -> dict:
    return json.loads((folder / "state.json").read_text())


def test_start_writes_config_environment_and_state(tmp_path, monkeypatch):
    """An earlier config stays until a start works."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = JobConfig()
    config.training.steps = 5
    folder = RunFolder(tmp_path, 0)
    folder.start(config)
    assert files_below(tmp_path) == ["config.toml", "env.json", "run.lock", "state.json"]
    environment = json.loads((tmp_path / "env.json").read_text())
    assert environment["versions"]["torchtitan"] == "0.2.2"
    assert environment["versions"]["torch"] and environment["device"] and environment["command"]
    assert (environment["world_size"], environment["gpus_per_node"]) == (4, 2)
    state = state_of(tmp_path)
    assert (state["state"], state["step"], state["pid"]) == ("init", 0, os.getpid())
    assert "saved_step" not in state
    folder.saved_step = 4
    folder.set_state("completed", 5)
    assert state_of(tmp_path)["saved_step"] == 4
    folder = RunFolder(tmp_path, 0)
    config.training.steps = 9
    folder.start(config)
    assert "steps = 5" in (tmp_path / "config.toml").read_text()
    assert (state_of(tmp_path)["state"], state_of(tmp_path)["step"]) == ("init", 5)
    folder.confirm(config)
    assert "steps = 9" in (tmp_path / "config.toml").read_text()


def test_resume_brings_every_line_file_back(tmp_path):
    """The first rank does it for all: another writes its audit alone."""
    folders = [RunFolder(tmp_path, rank) for rank in range(2)]
    folders[1].start(JobConfig())
    folders[1].confirm(JobConfig())
    folders[1].set_state("running", 3)
    for row in rows(1, 2, 3):
        folders[1].audit.append(row)
    assert files_below(tmp_path) == ["audit/rank1.jsonl"]
    files = [folders[0].metrics, folders[0].validation, folders[0].audit, folders[1].audit]
    for row in rows(1, 2, 3):
        for file in files[:3]:
            file.append(row)
    folders[1].resume_at(1)
    assert files[0].read() == rows(1, 2, 3)
    folders[0].resume_at(2)
    assert [file.read() for file in files] == [rows(1, 2)] * 4


@pytest.mark.parametrize(
    "error, state",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "oom"),
        (torch.distributed.DistBackendError("Watchdog caught collective timeout"), "timeout"),
        (RuntimeError("[gloo] Timed out waiting 1000ms for recv operation"), "timeout"),
        (InputError("[comm] train_timeout_seconds = -1 must not be negative"), "failed"),
        (RuntimeError("shape mismatch"), "failed"),
        (KeyboardInterrupt("terminated by SIGTERM"), "failed"),
    ],
)
def test_state_of_an_error(error, state):
    assert failure_state(error) == state


def test_the_cause_takes_the_place_of_its_effect(tmp_path):
    """A rank may learn that its peer has ended before that peer has written why."""
    ranks = [RunFolder(tmp_path, rank) for rank in range(3)]
    ranks[0].start(JobConfig())
    effect = RuntimeError("Connection closed by peer")
    for rank, error, kept in (
        (0, effect, ("failed", LOST_PEER, 0)),
        (1, MemoryError("no memory\nand a second line"), ("oom", "no memory", 1)),
        (2, effect, ("oom", "no memory", 1)),
        (0, RuntimeError("timed out"), ("oom", "no memory", 1)),
        (1, RuntimeError("later"), ("failed", "later", 1)),  # a rank may say more of itself
    ):
        ranks[rank].fail(error)
        state = state_of(tmp_path)
        assert (state["state"], state["error"], state["rank"]) == kept


def test_starts_beside_and_after_each_other(tmp_path):
    first = RunFolder(tmp_path, 0)
    first.start(JobConfig())
    first.fail(MemoryError())
    first.close()
    # An earlier start's failure is no cause of this one's.
    noted = RuntimeError("no data")
    noted.add_note("rank 3 stalls at step 2")
    RunFolder(tmp_path, 0).fail(noted)
    failed = state_of(tmp_path)
    assert (failed["state"], failed["error"]) == ("failed", "no data; rank 3 stalls at step 2")
    # A start that was refused changes nothing, nor does one beside it.
    refused, beside = RunFolder(tmp_path, 0), RunFolder(tmp_path, 0)
    refused.start(JobConfig())
    assert state_of(tmp_path)["state"] == "init"
    with pytest.raises(InputError, match=f"another process trains in it .process {os.getpid()} on"):
        beside.start(JobConfig())
    before = (tmp_path / "state.json").read_bytes()
    beside.fail(InputError("another start"))
    assert (tmp_path / "state.json").read_bytes() == before
    refused.fail(InputError("no data"))
    assert state_of(tmp_path) == failed
    refused.close()
    beside.start(JobConfig())


def test_a_start_that_a_wrong_input_ends_leaves_no_new_folder(tmp_path):
    (tmp_path / "run" / "comm_traces").mkdir(parents=True)  # by a rank that was faster
    for error in (InputError("no data"), KeyboardInterrupt("terminated by SIGTERM")):
        ranks = [RunFolder(tmp_path / "run", rank) for rank in range(2)]
        for folder in ranks:
            folder.start(JobConfig())
        for folder in ranks:
            folder.fail(error)
            folder.close()
        assert not (tmp_path / "run").exists()
    folder = RunFolder(tmp_path / "run", 0)
    folder.start(JobConfig())
    folder.confirm(JobConfig())  # it has trained from here on
    folder.fail(InputError("loss nan"))
    assert state_of(tmp_path / "run")["state"] == "failed"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("a user's own")
    RunFolder(tmp_path / "mine", 0).fail(InputError("no data"))
    assert (tmp_path / "mine").exists()


def test_no_file_holds_a_secret(tmp_path, monkeypatch):
    urls = [
        f"https://me:{SECRET}@host/{{0..3}}.tar",
        f"http://host:80/a.tar?X-Signature={SECRET}&v=1",
    ]
    config = JobConfig()
    config.data.path = [*urls, "s3://bucket/shard-?.tar"]
    monkeypatch.setattr("sys.argv", ["train.py", "--data.path", ",".join(urls)])
    monkeypatch.setenv("NCCL_PROXY", urls[0])
    folder = RunFolder(tmp_path / "run", 0)
    folder.start(config)
    folder.confirm(config)
    folder.fail(RuntimeError(f"cannot reach {urls[1]}"))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) == 4 and not [path for path in files if SECRET in path.read_text()]
    written = tomllib.loads((tmp_path / "run/config.toml").read_text())["data"]["path"]
    hidden = ["https://***@host/{0..3}.tar", "http://host:80/a.tar?***"]
    assert written == [*hidden, "s3://bucket/shard-?.tar"]
