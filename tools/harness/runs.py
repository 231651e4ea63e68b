"""Starts real training runs for the integration tests and reads what they leave behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from torch.distributed import TCPStore

from titan_tts.launch.supervisor import descendants
from tools.harness import forked
from torchtitan.models.dit_tts.files import JsonLines

ROOT = forked.ROOT

# Small enough that a run's time is its start; float32, so that equal means equal.
TINY = [
    "--training.local_batch_size=8",
    "--training.global_batch_size=8",
    "--training.mixed_precision_param=float32",
    "--data.batch_multiple=8",
    "--data.num_buckets=2",
    "--data.max_dropped_fraction=1",
    "--metrics.log_freq=1",
    "--metrics.no-enable-tensorboard",
    "--lr_scheduler.warmup_steps=2",
    "--debug.seed=7",
]


@dataclass
class Run:
    """A training run to be waited for or killed; its folder is dump_folder/experiment."""

    processes: list[forked.Child] | list[subprocess.Popen]
    """a child for each rank, or one process, the launcher's"""

    folder: Path
    log: Path
    store: TCPStore | None = None
    """where forked ranks meet; lives as long as the run"""

    def poll(self) -> int | None:
        """The exit status, that of the first rank that failed; None while all is well."""
        states = [process.poll() for process in self.processes]
        failures = [state for state in states if state]
        return failures[0] if failures else None if None in states else 0

    def wait(self, timeout_seconds: float = 240) -> int:
        if isinstance(self.processes[0], forked.Child):
            return forked.wait_for_all(self.processes, timeout_seconds)
        try:
            return self.processes[0].wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL to every process of the run at once, as a machine that dies would."""
        self._signal_all(signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """No process of the run does anything from here on; it can be killed."""
        self._signal_all(signal.SIGSTOP)

    def _signal_all(self, number: int) -> None:
        for process in self.processes:
            # The launcher's ranks have sessions of their own and outlive it.
            for pid in descendants(process.pid):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass

    def signal(self, number: int) -> None:
        """Signal the process that a user or a scheduler knows: the launcher, or one rank of the forked ones."""
        os.kill(self.processes[-1].pid, number)

    def metrics(self) -> dict[int, dict]:
        rows = JsonLines(self.folder / "metrics.jsonl").read()
        assert len({row["step"] for row in rows}) == len(rows), "a step was logged twice"
        return {row["step"]: row for row in rows}

    def audited_ids(self, ranks: int) -> dict[int, list[str]]:
        """Sample ids of each step over all ranks, sorted."""
        ids: dict[int, list[str]] = {}
        for rank in range(ranks):
            for row in JsonLines(self.folder / "audit" / f"rank{rank}.jsonl").read():
                ids.setdefault(row["step"], []).extend(row["ids"])
        return {step: sorted(names) for step, names in ids.items()}


def wait_until(
    holds: Callable[[], bool], seconds: float, found: Callable[[], str] = lambda: ""
) -> None:
    """Raises AssertionError, which says what was found, if it does not hold within these seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {found()}"
        time.sleep(0.1)


def _train(arguments: list[str]) -> None:
    """A rank: what train.py does."""
    import torchtitan.train

    from torchtitan.models.dit_tts.main import train

    # Upstream ends a run by sleeping two seconds: the other ranks may still need rank 0's store. Here it
    # is the test's.
    torchtitan.train.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    sys.argv = [str(ROOT / "train.py"), *arguments]
    sys.exit(train(arguments))


def start(
    dump_folder: Path,
    experiment: str,
    arguments: list[str],
    processes: int = 1,
    launcher: bool = False,
) -> Run:
    """Starts a run on this many ranks.

    Args:
        dump_folder, experiment: the run's folder is the one in the other.
        arguments: of the command line, over train_configs/debug.toml.
        processes: ranks.
        launcher: as a user starts it: `python train.py`, under the launcher for several ranks. Else the
            ranks are forked with everything imported.
    """
    log = dump_folder / f"{experiment}.{time.monotonic_ns()}.log"
    arguments = [
        "--job.config_file",
        str(ROOT / "train_configs/debug.toml"),
        "--job.dump_folder",
        str(dump_folder),
        "--job.experiment",
        experiment,
        *arguments,
    ]
    store = None
    if launcher:
        started = [_start_launcher(arguments, processes, log)]
    else:
        # As the launcher does: the ranks meet at a store of this process, whose port nobody else takes.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        group["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        started = [
            forked.start(
                _train,
                arguments,
                log=log,
                variables=forked.environment(RANK=str(rank), LOCAL_RANK=str(rank), **group),
            )
            for rank in range(processes)
        ]
    return Run(started, dump_folder / experiment, log, store)


def _start_launcher(arguments: list[str], processes: int, log: Path) -> subprocess.Popen:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "titan_tts.launch.torchrun", "--nproc_per_node", str(processes)]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    with open(log, "wb") as output:
        return subprocess.Popen(
            [*command, str(ROOT / "train.py"), *arguments],
            cwd=ROOT,
            env=forked.environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(
    dump_folder: Path,
    experiment: str,
    arguments: list[str],
    processes: int = 1,
    launcher: bool = False,
) -> Run:
    """Starts a run and waits for its success."""
    started = start(dump_folder, experiment, arguments, processes, launcher)
    status = started.wait()
    assert status == 0, f"exit status {status}:\n{started.log.read_text()[-4000:]}"
    return started


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, for messages."""
    lines = []
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "it printed nothing")
