"""Child processes that start with everything imported.

torch and the product take seconds to import. A server (multiprocessing's fork server) imports them once
for each process of pytest and forks every child from there, with a process group of its own.
"""

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10
"""from a rank's SIGTERM to its SIGKILL, where another has failed"""

IMPORTED = [
    "titan_tts.cli",
    "titan_tts.evaluate.evaluate_command",
    "titan_tts.launch.train_command",
    "titan_tts.prepare.pipeline",
    "titan_tts.prepare.prepare_command",
    "torchtitan.models.dit_tts.main",
    "torchtitan.models.dit_tts.run.benchmark.loader",
    "torchtitan.models.dit_tts.speech.codec.mel_dct",
    "torchtitan.models.dit_tts.trainer",
]
IMPORTED += ["torch.distributed.checkpoint", "torch._inductor.compile_fx"]
IMPORTED += [
    "transformers.models.t5gemma2.modeling_t5gemma2",
    "transformers.models.t5.modeling_t5",
]

# Read when libraries are loaded, so the server has them too: one thread, no accelerator (a machine may
# have fewer than a test has processes), and no pool of compilers, each of which would import torch.
_AT_IMPORT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_OF_A_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without a process group's variables, and with the changes."""
    own = {name: value for name, value in os.environ.items() if name not in _OF_A_GROUP}
    return {**own, **_AT_IMPORT, **changes}


@cache
def _server():
    """The context of the running server."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    before = dict(os.environ)
    os.environ.update(environment(PYTHONPATH=str(ROOT)))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


@dataclass
class Child:
    """A child that writes to a log; like subprocess.Popen where that is needed."""

    process: Any
    pid: int

    def poll(self) -> int | None:
        """Its exit status, negative for a signal, or None while it runs."""
        return self.process.exitcode

    def wait(self, timeout_seconds: float = 240) -> int:
        """Its exit status; -9 where the time ran out and it was killed."""
        return wait_for_all([self], timeout_seconds)

    def kill(self) -> None:
        """SIGKILL to it and to whatever it has started."""
        if self.process.exitcode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.kill()  # it may not have called setsid yet
        self.process.join()


def _enter(function: Callable, args: tuple, variables: dict[str, str], out: str, err: str) -> None:
    """Entry of a child: set its session, output, environment and folder, then call the function."""
    os.setsid()
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    for name in IMPORTED:  # the server is silent about what it could not import
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    function(*args)


def start(
    function: Callable,
    *args: Any,
    log: Path,
    errors: Path | None = None,
    variables: dict[str, str] | None = None,
) -> Child:
    """Starts `function(*args)`, which must be a module's, in a child; its output goes to `log`."""
    process = _server().Process(
        target=_enter,
        args=(function, args, variables or environment(), str(log), str(errors or log)),
    )
    process.start()
    return Child(process, process.pid)


def run_ranks(function: Callable, ranks: int, *args: Any, timeout_seconds: float = 240) -> None:
    """Runs `function(rank, *args)` in a child for each rank, all at once.

    Raises:
        AssertionError: one of them failed or did not end; has their output.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(ranks)]
        children = [start(function, rank, *args, log=log) for rank, log in enumerate(logs)]
        status = wait_for_all(children, timeout_seconds)
        assert status == 0, f"exit status {status}:\n" + "\n".join(map(tail, logs))


def tail(log: Path) -> str:
    """The end of a log, as far as it was written."""
    return log.read_text()[-4000:] if log.exists() else ""


def wait_for_all(children: list[Child], timeout_seconds: float) -> int:
    """Waits until all have ended. Where one fails, the others are ended as torchrun does.

    Returns: the status of the first that failed, or 0; -9 where the time ran out.
    """
    deadline = time.monotonic() + timeout_seconds
    failed = 0
    try:
        while None in (states := [child.poll() for child in children]):
            if failed == 0 and any(states):
                failed = next(state for state in states if state)
                for child in children:
                    child.process.terminate()
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                return failed or -signal.SIGKILL
            time.sleep(0.01)
        return failed or next((state for state in states if state), 0)
    finally:
        for child in children:
            child.kill()


@dataclass
class Ended:
    """Result of a command, like subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


def _console_command(arguments: list[str]) -> None:
    import titan_tts

    sys.argv = ["titan-tts", *arguments]
    titan_tts.main()


def start_titan_tts(*arguments: object, log: Path, errors: Path | None = None) -> Child:
    """Starts the console command."""
    return start(_console_command, [str(each) for each in arguments], log=log, errors=errors)


def titan_tts(*arguments: object, timeout_seconds: float = 240) -> Ended:
    """Runs the console command."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        status = start_titan_tts(*arguments, log=out, errors=err).wait(timeout_seconds)
        return Ended(status, out.read_text(), err.read_text())
