"""Runs as processes: how they are waited for and ended, and that their outcome is what they have written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_tts.launch import supervisor
from titan_tts.launch.supervisor import Outcome, RunProcess, kill_tree, last_line
from torchtitan.models.dit_tts.errors import InputError, report_input_errors
from torchtitan.models.dit_tts.run import launcher


def start(folder: Path, code: str, **options) -> RunProcess:
    command = [sys.executable, "-c", code]
    return RunProcess(command, folder / "run", folder / "run" / "run.log", **options)


def ended(run: RunProcess) -> Outcome:
    assert run.wait(60)
    run.end()
    return run.outcome()


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


@pytest.mark.parametrize("state", supervisor.ENDED)
def test_the_state_file_tells_the_outcome_whatever_the_status(in_folder, state):
    outcome = ended(start(in_folder, leaves({"state": state, "error": "why"}, "sys.exit(7)")))
    assert (outcome.state, outcome.reason) == (state, "why")


def test_an_earlier_starts_state_is_not_this_ones(in_folder):
    earlier = leaves({"state": "completed", "time": 12.5}, "sys.exit(3)")
    outcome = ended(start(in_folder, earlier))
    assert outcome.state == "failed" and "status 3" in outcome.reason


def test_a_run_that_dies_without_a_word(in_folder):
    code = leaves({"state": "running", "step": 4}, "os.kill(os.getpid(), signal.SIGKILL)")
    outcome = ended(start(in_folder, code))
    assert outcome.state == "failed" and "status -9 after step 4" in outcome.reason


def test_the_kernels_out_of_memory_killer_is_seen(in_folder, monkeypatch):
    kills = iter([5, 6])
    monkeypatch.setattr(supervisor, "_oom_kills", lambda: next(kills))
    outcome = ended(start(in_folder, "import os; os.kill(os.getpid(), 9)"))
    assert outcome.state == "oom"


def test_the_address_space_is_limited(in_folder):
    code = """
from torchtitan.models.dit_tts.errors import report_input_errors
@report_input_errors
def hungry(args):
    return len(bytearray(2**31))
hungry([])
"""
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    outcome = ended(start(in_folder, code, environment=path, memory_gib=1))
    assert outcome.state == "oom"
    assert ended(start(in_folder, code, environment=path)).state == "failed"  # no limit: no state


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
    assert json.loads(file.read_text()) == {
        "state": "failed",
        "error": "https://***@host/x is wrong",
    }


def test_waiting_has_an_end_and_a_condition(in_folder):
    run = start(in_folder, leaves({"state": "running"}, "time.sleep(1000)"))
    try:
        assert run.wait(60, until=lambda: run.state().get("state") == "running")
        assert not run.completed() and not run.wait(0.2)
    finally:
        run.end()
    assert run.process.returncode == -signal.SIGKILL


def test_a_run_may_save_before_it_is_killed(in_folder):
    save = leaves({"state": "preempted", "error": "SIGTERM"}, "sys.exit(143)")
    code = f"import signal, time; signal.signal(15, lambda *_: exec({save!r}));print(1,flush=True);time.sleep(99)"
    run = start(in_folder, code)
    assert run.wait(60, until=lambda: run.log.read_text() == "1\n")
    run.end(grace_seconds=60)
    assert run.outcome().state == "preempted" and run.process.returncode == 143


def test_processes_in_sessions_of_their_own_are_killed_too(tmp_path):
    sleeper = "import time; time.sleep(1000)"
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
        "start_new_session=True); print(child.pid, flush=True); child.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, sleeper], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    kill_tree(process)
    deadline = time.time() + 30
    while Path(f"/proc/{child}").exists() and time.time() < deadline:
        status = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        if status == "Z":  # nobody waits for it
            return
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()


def test_the_last_line_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert last_line(log) == "it printed nothing"
    log.write_text("one\n  two  \n\n")
    assert last_line(log) == "two"


def test_nothing_is_inherited_from_a_rank(in_folder, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    run = start(
        in_folder,
        "import os; print(os.environ.get('RANK'), os.environ['X'])",
        environment={"X": "y"},
    )
    ended(run)
    assert run.log.read_text() == "None y\n"
    assert os.environ["RANK"] == "3"


@pytest.mark.parametrize(
    "args, said",
    [
        ("train.py", "the default config, 1 process"),
        ("--job.config_file a.toml --data.path x", "a.toml, 1 process"),
        ("--nproc_per_node 2 -m titan_tts train --job.config-file=a.toml", "a.toml, 2 processes"),
        (
            "--nnodes 3 --nproc_per_node 8 train.py --job.config_file a.toml --job.config_file b.toml",
            "b.toml, 8 processes on each of 3 machines",
        ),
    ],
)
def test_the_first_line_says_what_is_started(args, said, capsys):
    launcher.say_start(args.split())
    assert capsys.readouterr().out == f"titan-tts train: {said}, starting\n"
