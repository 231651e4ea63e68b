"""`titan-tts launch` under SLURM's own daemons, and several machines without SLURM."""

import json
import re
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


def launch(folder: Path, *arguments: object) -> Path:
    """The script of a job on both nodes, one process each."""
    script = folder / "job.sh"
    nodes = ["--nodes", 2, "--gpus-per-node", 1, "--cpus-per-node", 1, "--out", script]
    ended = forked.titan_tts("launch", CONFIG, *nodes, *arguments)
    assert ended.returncode == 0 and ended.stdout == "", ended.stderr
    return script


def launch_stub(folder: Path, *arguments: object) -> Path:
    run = folder / "run"
    run.mkdir()
    stub = folder / "stub"
    stub.write_text(STUB.format(python=sys.executable, folder=run))
    stub.chmod(0o755)
    place = [f"--job.dump_folder={folder}", "--job.experiment=run"]
    return launch(folder, "--python", shlex.quote(str(stub)), *arguments, *place)


def wait_until_it_trains(slurm, job, starts=1):  # noqa: F811
    """On both nodes: a stub that a signal reaches sooner says nothing."""
    runs.wait_until(
        lambda: slurm.log(job).count("it trains") == 2 * starts, 120, lambda: slurm.log(job)
    )


def signal_as_at_the_time_limit(slurm, job):  # noqa: F811
    slurm.command("scancel", "--signal=USR1", "--batch", job)


def test_a_job_is_requeued_at_its_time_limit_as_often_as_allowed(slurm, tmp_path):  # noqa: F811
    job = slurm.submit(launch_stub(tmp_path, "--max-requeues", 1))
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


def test_a_preempted_job_saves_and_is_requeued(slurm, tmp_path):  # noqa: F811
    job = slurm.submit(launch_stub(tmp_path))
    wait_until_it_trains(slurm, job)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\n")
    slurm.submit(urgent, "--partition=urgent", "--nodes=2", "--exclusive")
    slurm.wait_for(job, "exit status 143; the run is preempted")
    slurm.wait_for(job, "titan-tts: requeued")
    slurm.wait_for_state(job, "PENDING")
    slurm.command("scancel", job)


@pytest.mark.matrix  # half a minute of waiting for the controller
def test_a_job_is_waited_for_until_it_is_cancelled(slurm, tmp_path):  # noqa: F811
    """The nodes are another's at first; then the run is stopped once. Cancelled it saves and is not requeued."""
    log, blocking = tmp_path / "waiting", tmp_path / "blocking.sh"
    blocking.write_text("#!/bin/sh\nsleep 1000\n")
    blocker = slurm.submit(blocking, "--nodes=2", "--exclusive")
    slurm.wait_for_state(blocker, "RUNNING")
    launch_stub(tmp_path)
    more = "--nodes 2 --gpus-per-node 1 --cpus-per-node 1 --submit --wait --price 3600".split()
    more += ["--python", shlex.quote(str(tmp_path / "stub")), "--job.experiment=run"]
    more += [f"--sbatch=output={slurm.folder}/%j.log", f"--job.dump_folder={tmp_path}"]
    words = [sys.executable, "-m", "titan_tts", "launch", str(CONFIG), *more]
    with open(log, "wb") as output:
        options = {"cwd": forked.ROOT, "env": slurm.environment(), "stderr": output}
        waiting = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)

    def says(text: str) -> None:
        runs.wait_until(lambda: text in log.read_text(), 120, log.read_text)

    try:
        says("PENDING (Resources)")
        slurm.command("scancel", blocker)
        says("RUNNING; 0.00 GPU hours")
        job = waiting.stdout.readline().strip()
        wait_until_it_trains(slurm, job)
        signal_as_at_the_time_limit(slurm, job)
        says("PENDING (BeginTime)")
        slurm.start_requeued(job)
        wait_until_it_trains(slurm, job, starts=2)
        slurm.command("scancel", job)
        slurm.wait_for(job, "exit status 143; the run is preempted")
        slurm.wait_for(job, "not requeued by this script: the job is ")
        says("CANCELLED")
        assert waiting.wait(30) == 1
    finally:
        waiting.kill()
    costs = [float(each) for each in re.findall(r"cost: (\d+\.\d+)$", log.read_text(), re.M)]
    # One GPU of each of two nodes, by seconds, of both starts.
    assert costs == sorted(costs) and costs[0] == costs[-1] % 2 == 0.0
    assert costs[-1] > 2 * int(slurm.job(job)["RunTime"].rpartition(":")[2])


@pytest.mark.parametrize("state", ["oom", "failed"])
def test_a_job_that_has_failed_is_not_requeued(slurm, tmp_path, state):  # noqa: F811
    job = slurm.submit(launch_stub(tmp_path), STUB_STATE=state)
    slurm.wait_for_state(job, "FAILED")
    assert f"the run is {state} at step 3 for a reason" in slurm.log(job)
    assert "requeued;" not in slurm.log(job) and slurm.job(job)["Restarts"] == "0"


def test_a_state_of_an_earlier_start_does_not_count(slurm, tmp_path):  # noqa: F811
    script = launch_stub(tmp_path)
    old = json.dumps({"state": "preempted", "step": 3, "time": 1e9})
    (tmp_path / "run" / "state.json").write_text(old)
    (tmp_path / "stub").write_text('#!/bin/sh\ncase $1 in -c) exec python3 "$@";; esac; exit 2')
    job = slurm.submit(script)
    slurm.wait_for_state(job, "FAILED")
    assert "exit status 2; the run is unstarted" in slurm.log(job)


def test_hostile_arguments_reach_the_process_unchanged(slurm, tmp_path):  # noqa: F811
    hostile = "a 'b' \"c\" $HOME $(touch x) `d` \\ * #\n--e;f &"
    folder = tmp_path / "with a space'"
    folder.mkdir()
    setup = f"export NCCL_DEBUG={shlex.quote(hostile)}"
    script = launch_stub(folder, "--setup", setup, f"--job.description={hostile}")
    job = slurm.submit(script, STUB_STATE="completed")
    slurm.wait_for_state(job, "COMPLETED")
    assert slurm.job(job)["Restarts"] == "0"
    found = json.loads((folder / "run" / "arguments.json").read_text())
    assert found[-1] == hostile and f"--job.description={hostile}" in found
    assert found[:4] == ["-m", "titan_tts", "train", str(CONFIG)]


def losses_ids_and_weights_agree(found: runs.Run, wanted: runs.Run) -> None:
    expected, metrics = wanted.metrics(), found.metrics()
    assert sorted(metrics) == sorted(expected) == list(range(1, kill_resume.STEPS + 1))
    assert found.audited_ids(ranks=2) == wanted.audited_ids(ranks=2)
    assert all(abs(metrics[s]["loss"] - expected[s]["loss"]) < 1e-5 for s in expected)
    weights, same = kill_resume.last_weights(found), kill_resume.last_weights(wanted)
    assert all((weights[name] - same[name]).abs().max() < 1e-4 for name in same)


@pytest.fixture
def unbroken(tmp_path):
    """A run of two forked ranks, and what it was started with."""
    with kill_resume.plain_data(tmp_path) as data:
        kill_resume.make_seed_checkpoint(tmp_path, data)
        arguments = [*kill_resume.common_arguments(tmp_path, data), "--data.num_workers=0"]
        arguments += ["--training.local_batch_size=4", "--comm.init_timeout_seconds=120"]
        yield runs.run(tmp_path, "unbroken", arguments, processes=2), arguments


def of_run(folder: Path, name: str, log: Path) -> runs.Run:
    return runs.Run([], folder / name, log)


@pytest.mark.slow
def test_a_run_that_slurm_interrupts_equals_the_unbroken_one(slurm, tmp_path, unbroken):  # noqa: F811
    """Two starts of a job on two nodes, and one of train_tts.slurm on a single node."""
    wanted, arguments = unbroken
    arguments = [*arguments, f"--job.dump_folder={tmp_path}", "--job.experiment=run"]
    job = slurm.submit(launch(tmp_path, "--max-requeues", 1, *arguments))
    run = of_run(tmp_path, "run", slurm.folder / f"{job}.log")

    def interrupt(step: int) -> None:
        runs.wait_until(lambda: max(run.metrics(), default=0) >= step, 120, lambda: slurm.log(job))
        signal_as_at_the_time_limit(slurm, job)

    interrupt(2)
    slurm.start_requeued(job)
    interrupt(max(run.metrics()) + 2)
    slurm.wait_for_state(job, "FAILED", 120)
    log = slurm.log(job)
    assert log.count("the run is preempted at step") == 2 and log.count("SIGUSR1: the run has") == 2
    state = json.loads((run.folder / "state.json").read_text())
    assert state["state"] == "preempted" and state["saved_step"] < kill_resume.STEPS

    script = forked.ROOT / "scripts/train_tts.slurm"
    options = ["--nodes=1", "--gpus-per-node=2", "--time=10", "--", *arguments]
    python = {"PYTHON": sys.executable, "CONFIG": str(CONFIG), "GPUS": "2"}
    job = slurm.submit(script, *options, **python)
    slurm.wait_for_state(job, "COMPLETED", 180)
    assert f"the run is completed at step {kill_resume.STEPS}" in slurm.log(job)
    losses_ids_and_weights_agree(run, wanted)


@pytest.mark.slow
def test_two_machines_without_slurm(tmp_path, unbroken):
    """Two launchers that meet at a port train as one group."""
    wanted, arguments = unbroken
    arguments = [*arguments, f"--job.dump_folder={tmp_path}", "--job.experiment=run"]
    meeting = ["--nodes", "2", "--rendezvous", f"localhost:{free_ports(1)[0]}"]
    command = [sys.executable, "-m", "titan_tts", "train", str(CONFIG), *meeting, *arguments]
    logs = [tmp_path / f"machine{number}.log" for number in range(2)]
    machines = []
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
    losses_ids_and_weights_agree(of_run(tmp_path, "run", logs[0]), wanted)
    ranks = json.loads((tmp_path / "run" / "ranks.json").read_text())
    assert [each["rank"] for each in ranks] == [0, 1] and ranks[0]["pid"] != ranks[1]["pid"]
