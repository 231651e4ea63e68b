"""`scripts/train_tts.slurm` with stand-ins for SLURM's commands, and several machines without SLURM."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.harness import forked, kill_resume, runs

CONFIG = forked.ROOT / "train_configs/debug.toml"

# Stands for Python on the nodes: notes its arguments and what it gets, and leaves a run's state.
STUB = """#!{python}
import json, os, signal, sys, time
if sys.argv[1] == "-c":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
def leave(state, status):
    with open("{folder}/run/state.json", "w") as file:
        json.dump(dict(state=state, step=3, time=time.time(), error="for a reason"), file)
    sys.exit(status)
signal.signal(signal.SIGUSR1, lambda number, frame: leave("preempted", 128 + number))
state = os.environ.get("STUB_STATE")
if state == "nothing":
    sys.exit(2)
with open("{folder}/arguments.json", "w") as file:
    json.dump(sys.argv[1:] + [os.environ.get("NCCL_DEBUG")], file)
if state:
    leave(state, state != "completed")
while True:
    time.sleep(0.1)
"""
# Of one node; the options end with --label.
COMMANDS = {
    "srun": 'echo "$*" >{folder}/srun; while [[ $1 != --label ]]; do shift; done; shift; exec "$@"',
    "squeue": "echo RUNNING",
    "scontrol": 'echo "$*" >{folder}/scontrol',
}


def submit(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    """The script of the job 7 on two nodes."""
    (folder / "run").mkdir(exist_ok=True)
    (folder / "bin").mkdir()
    texts = {name: f"#!/bin/bash\n{text}" for name, text in COMMANDS.items()}
    for name, text in (texts | {"stub": STUB}).items():
        (folder / "bin" / name).write_text(
            text.replace("{folder}", str(folder)).replace("{python}", sys.executable)
        )
        (folder / "bin" / name).chmod(0o755)
    own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    own |= {"CONFIG": str(CONFIG), "SLURM_GPUS_ON_NODE": "4", "PYTHON": str(folder / "bin/stub")}
    own["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
    place = [f"--job.dump_folder={folder}", "--job.experiment=run"]
    return subprocess.Popen(
        ["bash", str(forked.ROOT / "scripts/train_tts.slurm"), *arguments, *place],
        env=forked.environment(**own | variables),
        cwd=forked.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("restarts, status", [("0", 0), ("1", 138)])
def test_a_job_is_requeued_at_its_time_limit_as_often_as_allowed(tmp_path, restarts, status):
    job = submit(tmp_path, MAX_REQUEUES="1", SLURM_RESTART_COUNT=restarts)
    runs.wait_until((tmp_path / "arguments.json").exists, 60)
    job.send_signal(signal.SIGUSR1)
    printed, _ = job.communicate(timeout=60)
    assert "exit status 138; the run is preempted at step 3" in printed
    assert job.returncode == status and (tmp_path / "scontrol").exists() == (status == 0)
    asked = "requeued; the next start" if status == 0 else "this was requeue 1 of at most 1"
    assert asked in printed
    assert (tmp_path / "srun").read_text().startswith("--nodes 2 --ntasks 2 --ntasks-per-node 1 ")


@pytest.mark.parametrize(
    "state, arguments, status, said",
    [
        ("oom", [], 1, "exit status 1; the run is oom at step 3 for a reason"),
        (
            "nothing",
            [],
            2,
            "exit status 2; the run is unstarted",
        ),  # an earlier start's does not count
        ("completed", ["--training.stepss=3"], 2, "stepss"),
    ],
)
def test_a_job_that_has_failed_is_not_requeued(tmp_path, state, arguments, status, said):
    (tmp_path / "run").mkdir()
    old = json.dumps({"state": "preempted", "step": 3, "time": 1e9})
    (tmp_path / "run/state.json").write_text(old)
    job = submit(tmp_path, *arguments, STUB_STATE=state)
    printed, _ = job.communicate(timeout=60)
    assert said in printed and job.returncode == status and not (tmp_path / "scontrol").exists()
    assert (tmp_path / "srun").exists() == (not arguments)


def test_hostile_arguments_reach_the_process_unchanged(tmp_path):
    hostile = "a 'b' \"c\" $HOME $(touch x) `d` \\ * #\n--e;f &"
    setup = tmp_path / "setup of the site.sh"
    setup.write_text(f"export NCCL_DEBUG={shlex.quote(hostile)}")
    given = {"STUB_STATE": "completed", "SETUP": str(setup)}
    job = submit(tmp_path, f"--job.description={hostile}", **given)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 0, printed
    found = json.loads((tmp_path / "arguments.json").read_text())
    assert found[-1] == hostile and f"--job.description={hostile}" in found
    assert found[:4] == ["-m", "titan_tts", "train", str(CONFIG)]
    assert found[4:8] == ["--nodes", "2", "--nproc", "4"]


@pytest.mark.slow
def test_two_machines_without_slurm(tmp_path):
    """Two launchers that meet at a port train as one group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = ["--nodes", "2", "--rendezvous", f"localhost:{free.getsockname()[1]}"]
    machines, logs = [], [tmp_path / f"machine{number}.log" for number in range(2)]
    with kill_resume.plain_data(tmp_path) as data:
        kill_resume.make_seed_checkpoint(tmp_path, data)
        arguments = [*kill_resume.common_arguments(tmp_path, data), "--data.num_workers=0"]
        arguments += ["--training.local_batch_size=4", "--comm.init_timeout_seconds=120"]
        wanted = runs.run(tmp_path, "unbroken", arguments, processes=2)
        arguments += [f"--job.dump_folder={tmp_path}", "--job.experiment=run"]
        command = [sys.executable, "-m", "titan_tts", "train", str(CONFIG), *meeting, *arguments]
        try:
            for log in logs:
                with open(log, "wb") as output:
                    common = {"cwd": forked.ROOT, "env": forked.environment(), "stdout": output}
                    machines.append(subprocess.Popen(command, stderr=output, **common))
            ended = [machine.wait(180) for machine in machines]
            assert ended == [0, 0], "".join(map(forked.tail, logs))
        finally:
            for machine in machines:
                machine.kill()
    found = runs.Run([], tmp_path / "run", logs[0])
    assert found.audited_ids(ranks=2) == wanted.audited_ids(ranks=2)
    losses = [[row["loss"] for row in run.metrics().values()] for run in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == kill_resume.STEPS
    ranks = json.loads((tmp_path / "run" / "ranks.json").read_text())
    assert [each["rank"] for each in ranks] == [0, 1] and ranks[0]["pid"] != ranks[1]["pid"]
