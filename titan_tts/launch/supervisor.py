"""Starts a training run in processes of its own, waits for it, ends it, and reads its outcome.

The outcome comes from the run's `state.json` and the file of its error, never from its log. torch is not
imported: a supervisor starts at once and leaves the memory to the runs.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.errors import ERROR_FILE_VARIABLE
from torchtitan.models.dit_tts.run.launcher import RANK_VARIABLES, die_with_parent

ENDED = ("completed", "preempted", "interrupted", "oom", "failed", "timeout")
"""States of `state.json` in which a run has ended"""

_FIRST_PORT, _PORTS = 15_000, 15_000
"""at which nodes meet, below Linux's ephemeral ports, which begin at 32768; the job's id selects one"""
_POLL_SECONDS = 0.05


def children(parent: int) -> list[int]:
    """Process ids of the children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(folder.name))
    return found


def descendants(process: int) -> list[int]:
    """Process ids of a process, its children, theirs, and so on."""
    found = [process]
    for pid in found:
        found.extend(children(pid))
    return found


def interrupt_on_signals() -> None:
    """Makes SIGTERM and SIGHUP interrupt this process as Ctrl-C does, so that it ends its runs."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"terminated by {signal.Signals(number).name}")

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, interrupt)


def wait_passing_on(
    process: subprocess.Popen, signals: Sequence[signal.Signals], pass_on: Callable[[int], None]
) -> int:
    """Waits for a process, while these signals to this one call `pass_on`. Returns its exit status as shells have it, 128 +
    signal for one that a signal ended."""
    before = {each: signal.signal(each, lambda number, frame: pass_on(number)) for each in signals}
    try:
        status = process.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return status if status >= 0 else 128 - status


def has_ended(process: subprocess.Popen) -> bool:
    """True if it has. Unlike `poll` this leaves its id to it, by which `kill_tree` kills what it has started."""
    if process.returncode is not None:
        return True
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, how) is not None


def kill_tree(process: subprocess.Popen) -> None:
    """Kills a process and its descendants, also those in sessions of their own, and waits for it. Of one that was
    waited for before, nothing is killed: its id may be a stranger's."""
    if process.returncode is None:
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # processes that an ended leader left in its group
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def train_command(config: str | Path, processes: int, nodes: int = 1) -> list[str]:
    """The command of a run on this machine, or on several nodes of this SLURM job; `processes`: on all of them."""
    train = [sys.executable, "-m", "titan_tts", "train", str(config)]
    if nodes == 1:
        return [*train, "--nproc", str(processes)] if processes > 1 else train
    port = _FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % _PORTS
    meeting = f"{socket.gethostname()}:{port}"
    return [
        *("srun", "--nodes", str(nodes), "--ntasks", str(nodes), "--ntasks-per-node", "1"),
        *("--cpu-bind", "none", *train, "--nodes", str(nodes)),
        *("--nproc", str(processes // nodes), "--rendezvous", meeting),
    ]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: its state (one of ENDED), one sentence (empty if completed), and the time it took."""

    state: str
    reason: str
    seconds: float


class RunProcess:
    """A training run that was just started by a process, which may start others. Its output is appended to `log`."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path):
        self.folder = folder
        self.log = log
        self.began = time.time()
        self._error_file = log.with_name(f"{log.name}.error.json")
        self._error_file.unlink(missing_ok=True)
        inherited = {key: each for key, each in os.environ.items() if key not in RANK_VARIABLES}
        # Batches of several shapes fragment the allocator's fixed segments.
        variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | inherited
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                env=variables | {ERROR_FILE_VARIABLE: str(self._error_file)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def state(self) -> dict[str, Any]:
        """The run's state.json; empty before this start has written it."""
        state = read_json(self.folder / "state.json")
        written = state.get("time", 0.0)
        return state if isinstance(written, float) and written >= self.began else {}

    def completed(self) -> bool:
        return self.state().get("state") == "completed"

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Waits until the run has ended or `until` holds. Returns False if neither happens in time."""
        deadline = time.time() + seconds
        while not has_ended(self.process) and not until():
            if time.time() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def end(self, grace_seconds: float = 0.0) -> None:
        """Ends the run by SIGKILL, with a grace time by SIGTERM first, so that it can save."""
        try:
            if grace_seconds and not has_ended(self.process):
                os.kill(self.process.pid, signal.SIGTERM)
                self.wait(grace_seconds)
        finally:  # also after a second Ctrl-C
            kill_tree(self.process)

    def outcome(self) -> Outcome:
        """The outcome of the run, which must have ended; a killed run has failed."""
        seconds = time.time() - self.began
        state, error = self.state(), read_json(self._error_file)
        if state.get("state") in ENDED:
            return Outcome(state["state"], str(state.get("error", "")), seconds)
        if error:
            return Outcome(str(error.get("state")), str(error.get("error")), seconds)
        status = self.process.returncode
        reason = f"its process ended with status {status} after step {state.get('step', 0)}"
        if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            reason += "; the kernel may have killed it for lack of memory"
        return Outcome("failed", reason, seconds)
