"""Runs as processes: how they are waited for and ended, and that their outcome is what they have written."""

import json
import signal
import sys
from pathlib import Path

import pytest

from titan_tts.launch import supervisor
from titan_tts.launch.supervisor import RunProcess, kill_tree, train_command
from tools.harness.runs import wait_until
from torchtitan.models.dit_tts.errors import InputError, report_input_errors


def start(folder: Path, code: str) -> RunProcess:
    return RunProcess([sys.executable, "-c", code], folder / "run", folder / "run/run.log")


def outcome(folder: Path, code: str) -> tuple[str, str]:
    """(state, reason) of a run that has ended."""
    run = start(folder, code)
    assert run.wait(60)
    run.end()
    found = run.outcome()
    return found.state, found.reason


def leaves(state: dict, then: str = "") -> str:
    content = f"dict({state!r}, time={state.get('time', 'time.time()')})"
    return (
        "import json, os, signal, sys, time;"
        f"open('state.json', 'w').write(json.dumps({content})); {then}"
    )


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path


def test_the_state_file_tells_the_outcome(in_folder):
    """Whatever the exit status, but not the file of an earlier start."""
    preempted = leaves({"state": "preempted", "error": "why"}, "sys.exit(7)")
    assert outcome(in_folder, preempted) == ("preempted", "why")
    state, reason = outcome(in_folder, leaves({"state": "completed", "time": 12.5}, "sys.exit(3)"))
    assert state == "failed" and "status 3" in reason
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    state, reason = outcome(in_folder, leaves({"state": "running", "step": 4}, killed))
    assert state == "failed" and "status -9 after step 4; the kernel may" in reason


def test_the_command_of_a_run(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "30007")
    monkeypatch.setattr(supervisor.socket, "gethostname", lambda: "host")
    start = [sys.executable, "-m", "titan_tts", "train", "c.toml"]
    assert train_command("c.toml", 1) == start
    assert train_command("c.toml", 8) == [*start, "--nproc", "8"]
    assert " ".join(train_command("c.toml", 8, nodes=2)) == (
        "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --cpu-bind none "
        f"{' '.join(start)} --nodes 2 --nproc 4 --rendezvous host:15007"
    )


def test_the_first_error_of_several_ranks_is_kept(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TITAN_TTS_ERROR_FILE", str(file))

    def fail(error: Exception):
        @report_input_errors
        def command(args):
            raise error

        return command([])

    assert fail(RuntimeError("Connection closed by peer")) == 1
    assert not file.exists()  # the rank that died first has the cause
    assert fail(InputError("https://me:secret@host/x is wrong")) == 2
    assert fail(InputError("later")) == 2
    expected = {"state": "failed", "error": "https://***@host/x is wrong"}
    assert json.loads(file.read_text()) == expected
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    with pytest.raises(RuntimeError, match="a bug"):
        fail(RuntimeError("a bug"))
    assert fail(RuntimeError("the collective timed out")) == 1


def test_a_run_may_save_before_it_is_killed(in_folder, monkeypatch):
    """And it inherits all but a rank, and has segments that grow."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    save = leaves({"state": "preempted", "error": "SIGTERM"}, "sys.exit(143)")
    code = (
        f"import os, signal, time; signal.signal(15, lambda *_: exec({save!r}));"
        "names = 'RANK', 'X', 'PYTORCH_ALLOC_CONF';"
        "print(*map(os.environ.get, names), flush=True); time.sleep(99)"
    )
    monkeypatch.setenv("X", "x")
    run = start(in_folder, code)
    assert run.wait(60, until=lambda: run.log.read_text() == "None x expandable_segments:True\n")
    assert not run.completed() and not run.wait(0.1)
    run.end(grace_seconds=60)
    assert run.outcome().state == "preempted" and run.process.returncode == 143
    stubborn = start(in_folder, "import time; time.sleep(99)")
    stubborn.end()
    assert stubborn.process.returncode == -signal.SIGKILL


def test_processes_in_sessions_of_their_own_are_killed_too(in_folder):
    code = (
        "import subprocess, sys, time; sleep = [sys.executable, '-c', 'import time; time.sleep(99)'];"
        "print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True); time.sleep(99)"
    )
    run = start(in_folder, code)
    assert run.wait(60, until=lambda: run.log.read_text().endswith("\n"))
    left = int(run.log.read_text())
    assert not ended(left)
    kill_tree(run.process)
    wait_until(lambda: ended(left), 30)


def ended(pid: int) -> bool:
    """Or nobody waits for it."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_an_ended_run_left_is_killed_and_once_it_was_waited_for_nothing(
    in_folder, monkeypatch
):
    """Its id, and its group's, may by then be a stranger's."""
    code = (
        "import subprocess, sys; sleep = [sys.executable, '-c', 'import time; time.sleep(99)'];"
        "print(subprocess.Popen(sleep).pid, flush=True)"
    )
    run = start(in_folder, code)
    assert run.wait(60)
    left = int(run.log.read_text())
    assert not ended(left)
    run.end(grace_seconds=60)
    wait_until(lambda: ended(left), 30)
    sent = []
    for name in ("kill", "killpg"):
        monkeypatch.setattr(supervisor.os, name, lambda *args: sent.append(args))
    run.end(grace_seconds=60)
    assert sent == [] and run.process.returncode == 0
