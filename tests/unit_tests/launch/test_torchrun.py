"""The launcher and torchrun below it, with ranks that import no torch."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from titan_tts import cli
from titan_tts.launch import torchrun
from titan_tts.launch.supervisor import descendants
from tools.harness.forked import ROOT
from tools.harness.runs import wait_until

RANK = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(number, frame):
    time.sleep(1)
    (folder / "saved").write_text(str(number))
    sys.exit(128 + number)
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, save)
(folder / "ready").touch()
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def launched(tmp_path):
    """A launcher with one rank that has begun."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "titan_tts.launch.torchrun", "--standalone"]
    process = subprocess.Popen(
        [*command, str(script), str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        wait_until((tmp_path / "ready").exists, 60)
        yield process, tmp_path
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_signal_to_every_process_waits_for_the_save(launched):
    """As SLURM without cgroups sends it: to the launcher, torchrun and the rank."""
    process, folder = launched
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGUSR1)
    assert process.wait(30) == 128 + signal.SIGUSR1
    assert (folder / "saved").read_text() == str(int(signal.SIGUSR1))


@pytest.mark.parametrize(
    ("end", "status"), [("os.kill(os.getpid(), 9)", 128 + 9), ("sys.exit(3)", 3), ("pass", 0)]
)
def test_the_command_ends_with_the_status_of_torchrun(monkeypatch, end, status):
    """Each of several machines starts its own processes."""
    own = "'--nnodes 3', '--nproc_per_node 2', '--rdzv_endpoint host:7'"
    check = f"all(each in ' '.join(sys.argv) for each in ({own})) or sys.exit(99)"
    monkeypatch.setattr(torchrun, "_AGENT", f"import os, sys; {check}; {end}")
    machines = ["--nodes", "3", "--rendezvous", "host:7"]
    command = ["train", "debug", "--nproc", "2", *machines]
    assert cli.main(command) == status
    for wrong in (["--training.stepss", "3"], ["--parallelism.data_parallel_shard_degree", "4"]):
        assert cli.main([*command, *wrong]) == 2  # before anything starts


@pytest.mark.long
def test_a_machine_that_waits_in_vain_for_another_says_so():
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"--rdzv_endpoint=localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "titan_tts.launch.torchrun", "--nnodes=2", place]
    command += ["--rdzv_backend=c10d", "--rdzv_conf=join_timeout=1", "rank.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert "error: the machines have not met (RendezvousTimeoutError); give all" in found.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "status"), [("import os; os.kill(os.getpid(), 9)", 128 + 9), ("raise SystemExit(3)", 3)]
)
def test_a_rank_that_fails_or_is_killed_fails_the_run(tmp_path, end, status):
    script = tmp_path / "rank.py"
    script.write_text(end)
    command = [sys.executable, "-m", "titan_tts.launch.torchrun", "--standalone", str(script)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == status


@pytest.mark.long
def test_ranks_end_with_their_launcher(launched):
    process, folder = launched
    below = descendants(process.pid)[1:]
    process.kill()
    wait_until((folder / "saved").exists, 30)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 30)
