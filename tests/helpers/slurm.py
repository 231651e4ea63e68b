"""A SLURM cluster of two nodes on this machine: the daemons themselves, with a configuration of their own in
a temporary folder. `slurm` is a fixture."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools.harness import forked
from tools.harness.runs import wait_until

_NODES = ("node1", "node2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_PATH = "/usr/sbin:/sbin:" + os.environ.get("PATH", "")

_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
SchedulerParameters=bf_interval=1,sched_interval=1
NodeName=node1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=8 RealMemory=1000 Gres=gpu:2
NodeName=node2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=8 RealMemory=1000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES
"""


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@dataclass
class Cluster:
    """The daemons, and the commands of a user. Job ids are texts."""

    folder: Path
    daemons: list[subprocess.Popen] = field(default_factory=list)

    def environment(self, **variables: str) -> dict[str, str]:
        own = forked.environment(SLURM_CONF=f"{self.folder}/slurm.conf", PATH=_PATH)
        return own | variables

    def command(self, *words: object, **variables: str) -> str:
        """The output of a program, which must succeed."""
        options = {"env": self.environment(**variables), "cwd": forked.ROOT, "text": True}
        done = subprocess.run([str(word) for word in words], capture_output=True, **options)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, **variables: str) -> str:
        """Options may be followed by the script's arguments: those behind `--` are the script's."""
        split = options.index("--") if "--" in options else len(options)
        output = f"--output={self.folder}/%j.log"
        command = ["sbatch", "--parsable", output, *options[:split], script, *options[split + 1 :]]
        return self.command(*command, **variables)

    def job(self, job: str) -> dict[str, str]:
        words = self.command("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self, job: str) -> str:
        path = self.folder / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: str, text: str, seconds: float = 120) -> None:
        """Until the job's log has the text."""
        wait_until(lambda: text in self.log(job), seconds, lambda: self.log(job)[-4000:])

    def wait_for_state(self, job: str, state: str, seconds: float = 60) -> None:
        """Until the job is in this state: PENDING where it has been requeued, or one of its end."""

        def found() -> str:
            return f"{self.job(job)['JobState']}, {self.log(job)[-4000:]}"

        wait_until(lambda: self.job(job)["JobState"] == state, seconds, found)

    def start_requeued(self, job: str) -> None:
        """Now, not after the two minutes that SLURM lets pass."""

        def started() -> bool:
            found = self.job(job)
            # Once is not enough: SLURM sets the time when the processes of the last start have ended.
            if found["JobState"] == "PENDING" and found["Reason"] == "BeginTime":
                time.sleep(3)  # a node refuses a job of the second in which its last start ended
                self.command("scontrol", "update", f"JobId={job}", "StartTime=now")
            return found["JobState"] == "RUNNING"

        self.wait_for_state(job, "PENDING")
        wait_until(started, 60, lambda: f"{self.job(job)}, {self.log(job)[-4000:]}")

    def close(self) -> None:
        """Ends jobs, then daemons, whatever has happened before."""
        try:
            if len(self.daemons) == 2 + len(_NODES):
                self.command("scancel", "--user", "root")
                wait_until(lambda: not self.command("squeue", "--noheader"), 40)
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in reversed(self.daemons):
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
            shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _start(cluster: Cluster) -> None:
    folder = cluster.folder
    folder.chmod(0o755)  # munged refuses a folder that others cannot enter
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    text = _CONFIG.format(folder=folder, host=socket.gethostname(), ports=free_ports(3))
    (folder / "slurm.conf").write_text(text)
    for number in range(2):  # a GPU must have a file
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={folder}/gpu[0-1]\n")
    for name in ("state", *(f"spool-{node}" for node in _NODES)):
        (folder / name).mkdir()

    def daemon(name: str, *arguments: str) -> None:
        with open(folder / f"daemon-{len(cluster.daemons)}.log", "wb") as output:
            words = [str(shutil.which(name, path=_PATH)), *arguments]
            options = {"env": cluster.environment(), "preexec_fn": _end_with_parent}
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, **options)
            cluster.daemons.append(process)

    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
    daemon("munged", "--foreground", *(f"--{key}={folder}/{name}" for key, name in files.items()))
    wait_until((folder / "munge.socket").exists, 20)
    daemon("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
    for node in _NODES:
        daemon("slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", node)

    def idle() -> bool:
        words = ["sinfo", "--noheader", "--partition=main", "--format=%T %D"]
        done = subprocess.run(words, env=cluster.environment(), capture_output=True, text=True)
        return done.stdout.strip() == f"idle {len(_NODES)}"

    def logs() -> str:
        return "\n".join(path.read_text()[-1500:] for path in folder.glob("daemon-*.log"))

    wait_until(idle, 30, logs)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    if os.getuid() != 0:
        pytest.skip("SLURM's daemons need root")
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="slurm-")))
    try:
        _start(cluster)
        yield cluster
    finally:
        cluster.close()
