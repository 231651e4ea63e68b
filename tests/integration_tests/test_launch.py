"""`scripts/train_tts.slurm` under SLURM's own daemons, and several machines without SLURM."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.slurm import free_ports, slurm  # noqa: F401
from tools.harness import forked, kill_resume, runs

CONFIG = forked.ROOT / "train_configs/debug.toml"

# Stands for Python on the nodes: notes its arguments and what it gets, and leaves a run's state.
STUB = """#!{python}
import json, os, signal, sys, time
if sys.argv[1] == "-c":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
def leave(state, status):
    if os.environ["SLURM_NODEID"] == "0":  # two would write into each other's
        with open("{folder}/state.json", "w") as file:
            json.dump(dict(state=state, step=3, time=time.time(), error="for a reason"), file)
    sys.exit(status)
def stopped(number, frame):
    time.sleep(0.5)  # a save
    leave("preempted", 128 + number)
signal.signal(signal.SIGUSR1, stopped)
signal.signal(signal.SIGTERM, stopped)
if os.environ["SLURM_NODEID"] == "0":
    with open("{folder}/arguments.json", "w") as file:
        json.dump(sys.argv[1:] + [os.environ.get("NCCL_DEBUG")], file)
print("it trains", flush=True)
state = os.environ.get("STUB_STATE")
if state:
    leave(state, state != "completed")
while True:
    time.sleep(0.1)
"""


NODES = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=100", "--time=10")


def submit(slurm, python, *arguments: str, **variables: str) -> str:  # noqa: F811
    """Puts the job into the queue, on both nodes with one process each. Returns its id."""
    common = {"CONFIG": str(CONFIG), "GPUS": "1", "PYTHON": str(python)}
    script = forked.ROOT / "scripts/train_tts.slurm"
    return slurm.submit(script, *NODES, "--oversubscribe", "--", *arguments, **common | variables)


def submit_stub(slurm, folder: Path, *arguments: str, **variables: str) -> str:  # noqa: F811
    (folder / "run").mkdir()
    stub = folder / "stub"
    stub.write_text(STUB.format(python=sys.executable, folder=folder / "run"))
    stub.chmod(0o755)
    place = [f"--job.dump_folder={folder}", "--job.experiment=run"]
    return submit(slurm, stub, *arguments, *place, **variables)


def wait_until_it_trains(slurm, job, starts=1):  # noqa: F811
    """On both nodes: a stub that a signal reaches sooner says nothing."""
    runs.wait_until(
        lambda: slurm.log(job).count("it trains") == 2 * starts, 120, lambda: slurm.log(job)
    )


def signal_as_at_the_time_limit(slurm, job):  # noqa: F811
    slurm.command("scancel", "--signal=USR1", "--batch", job)


def test_a_job_is_requeued_at_its_time_limit_as_often_as_allowed(slurm, tmp_path):  # noqa: F811
    job = submit_stub(slurm, tmp_path, MAX_REQUEUES="1")
    wait_until_it_trains(slurm, job)
    signal_as_at_the_time_limit(slurm, job)
    slurm.wait_for(job, "exit status 138; the run is preempted at step 3")
    slurm.start_requeued(job)
    slurm.wait_for(job, "requeued 1 times")
    wait_until_it_trains(slurm, job, starts=2)
    signal_as_at_the_time_limit(slurm, job)
    slurm.wait_for(job, "not requeued: this was requeue 1 of at most 1")
    slurm.wait_for_state(job, "FAILED")
    assert slurm.job(job)["ExitCode"] == "138:0"


def test_a_job_that_has_failed_is_not_requeued(slurm, tmp_path):  # noqa: F811
    job = submit_stub(slurm, tmp_path, STUB_STATE="oom")
    slurm.wait_for_state(job, "FAILED")
    assert "the run is oom at step 3 for a reason" in slurm.log(job)
    assert "requeued;" not in slurm.log(job) and slurm.job(job)["Restarts"] == "0"


def test_a_state_of_an_earlier_start_does_not_count(slurm, tmp_path):  # noqa: F811
    (tmp_path / "run").mkdir()
    old = json.dumps({"state": "preempted", "step": 3, "time": 1e9})
    (tmp_path / "run" / "state.json").write_text(old)
    stub = tmp_path / "stub"
    stub.write_text(f'#!/bin/sh\ncase $1 in -c) exec {sys.executable} "$@";; esac; exit 2')
    stub.chmod(0o755)
    job = submit(slurm, stub, f"--job.dump_folder={tmp_path}", "--job.experiment=run")
    slurm.wait_for_state(job, "FAILED")
    assert "exit status 2; the run is unstarted" in slurm.log(job)


def test_a_mistake_in_the_config_ends_the_job_before_its_nodes_start(slurm, tmp_path):  # noqa: F811
    job = submit_stub(slurm, tmp_path, "--training.stepss=3")
    slurm.wait_for_state(job, "FAILED")
    assert "stepss" in slurm.log(job) and "it trains" not in slurm.log(job)
    assert slurm.job(job)["ExitCode"] == "2:0"


def test_hostile_arguments_reach_the_process_unchanged(slurm, tmp_path):  # noqa: F811
    hostile = "a 'b' \"c\" $HOME $(touch x) `d` \\ * #\n--e;f &"
    setup = tmp_path / "setup of the site.sh"
    setup.write_text(f"export NCCL_DEBUG={shlex.quote(hostile)}")
    arguments = {"STUB_STATE": "completed", "SETUP": str(setup)}
    job = submit_stub(slurm, tmp_path, f"--job.description={hostile}", **arguments)
    slurm.wait_for_state(job, "COMPLETED")
    assert slurm.job(job)["Restarts"] == "0"
    found = json.loads((tmp_path / "run" / "arguments.json").read_text())
    assert found[-1] == hostile and f"--job.description={hostile}" in found
    assert found[:4] == ["-m", "titan_tts", "train", str(CONFIG)]


@pytest.mark.slow
def test_two_machines_without_slurm(tmp_path):
    """Two launchers that meet at a port train as one group."""
    meeting = ["--nodes", "2", "--rendezvous", f"localhost:{free_ports(1)[0]}"]
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
