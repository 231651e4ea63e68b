"""The run folder: resolved config, environment, state and JSON lines, which tools read.

Only rank 0 writes, except for the audit files, one per rank. Files are replaced atomically; a line is
appended in one write.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w
import torch
from filelock import FileLock, Timeout
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import without_none
from torchtitan.models.dit_tts.errors import (
    LOST_PEER,
    InputError,
    failure_state,
    is_lost_peer,
    sentence_of,
    without_secrets,
)
from torchtitan.models.dit_tts.files import JsonLines, write_atomic
from torchtitan.models.dit_tts.run.launcher import launcher_number

_VARIABLES = ("CUDA_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "TRITON_")
"""Prefixes of environment variables that change what a run computes or how fast"""

STATES = ("init", "running", "completed", "preempted", "interrupted", "oom", "failed", "timeout")
LOCK = "run.lock"


def _git_commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    here = Path(__file__).resolve().parent
    try:
        result = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def gpus_per_node() -> int:
    """Processes of this run on this machine, as torchrun sets it."""
    return launcher_number("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))


def _cuda() -> dict[str, str | None]:
    """Versions of the libraries torch was built with, and of the driver; None: not here."""
    nccl = cudnn = driver = None
    if Path("/proc/driver/nvidia/version").is_file():
        driver = Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
    if torch.cuda.is_available():
        cudnn = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"cuda": torch.version.cuda, "cudnn": cudnn, "nccl": nccl, "driver": driver}


def environment() -> dict[str, Any]:
    """Versions, device, relevant environment variables and git commit of this process."""
    packages = ("torch", "torchtitan", "numpy", "transformers", "torchao")
    return {
        "versions": {name: version(name) if find_spec(name) else None for name in packages},
        **_cuda(),
        "variables": {
            name: without_secrets(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES)
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": utils.device_module.get_device_name(),
        "device_type": utils.device_type,
        "cpu_threads": torch.get_num_threads(),
        "world_size": launcher_number("WORLD_SIZE", "1"),
        "gpus_per_node": gpus_per_node(),
        "git_commit": _git_commit(),
        "command": without_secrets(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class RunFolder:
    """Writes the run folder; see the README's "Output files"."""

    def __init__(self, path: Path, rank: int):
        self.path = path
        self.rank = rank
        # Another rank's traces of communication may be there already.
        known = {"comm_traces", LOCK}
        self.is_new = not path.is_dir() or {p.name for p in path.iterdir()} <= known
        self._lock = FileLock(path / LOCK, timeout=0)
        self._refused = False
        self.confirmed = False
        self.earlier: dict[str, Any] = {}
        self.started = time.time()
        self.step = 0
        self.saved_step: int | None = None
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.validation = JsonLines(path / "validation.jsonl")
        self.audit = JsonLines(path / "audit" / f"rank{rank}.jsonl")

    def start(self, config: JobConfig) -> None:
        """Locks the folder, and writes the state `init` and, in a new folder, config and environment."""
        if self.rank == 0:
            self._take_lock()
        self.earlier = self._state()
        self.step = self.earlier.get("step", 0)
        self.saved_step = self.earlier.get("saved_step")
        if self.rank == 0 and not (self.path / "config.toml").exists():
            self._write_config(config)
        self.set_state("init", self.step)

    def _take_lock(self) -> None:
        # The kernel frees it when the process ends, however it ends; NFS 4 does so for its clients.
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            self._refused = True
            known = self._state()
            raise InputError(
                f"{self.path}: another process trains in it (process {known.get('pid')} on "
                f"{known.get('host')}, at step {known.get('step')}); wait for it, end it, or give another "
                f"[job] experiment"
            ) from None
        except NotImplementedError:
            logger.warning(
                f"{self.path} is on a file system without locks: start only one run in it"
            )
        except OSError as error:
            raise InputError(
                f"[job] dump_folder: {self.path} cannot be written ({error.strerror}); give another"
            ) from None

    def close(self) -> None:
        """Lets another start into the folder."""
        self._lock.release()

    def confirm(self, config: JobConfig) -> None:
        """Writes the resolved config and the environment. Called once the checkpoint is loaded, so that
        only a start that works replaces what an earlier one wrote."""
        self.confirmed = True
        if self.rank == 0:
            self._write_config(config)
            (self.path / "samples").mkdir(exist_ok=True)

    def _write_config(self, config: JobConfig) -> None:
        content = tomli_w.dumps(without_secrets(without_none(asdict(config))))
        write_atomic(self.path / "config.toml", content)
        write_atomic(self.path / "env.json", json.dumps(environment(), indent=2) + "\n")

    def write_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Rank 0 writes ranks.json: host, process and device of every rank of this start."""
        if self.rank == 0:
            lines = ",\n".join(map(json.dumps, ranks))
            write_atomic(self.path / "ranks.json", f"[\n{lines}\n]\n")

    def _state(self) -> dict[str, Any]:
        return read_json(self.path / "state.json", step=int)

    def resume_at(self, step: int) -> None:
        """Drops the lines of steps after `step`, which is the one that was loaded."""
        if self.rank == 0:
            audits = (self.path / "audit").glob("rank*.jsonl")
            for lines in (self.metrics, self.validation, *map(JsonLines, audits)):
                if corrupt := lines.keep_until(step):
                    logger.warning(
                        f"{lines.path}: {corrupt} corrupt lines are set aside in .corrupt"
                    )

    def set_state(self, state: str, step: int) -> None:
        """Rank 0 writes state.json: one of STATES, the last step and the time."""
        assert state in STATES
        self.step = step
        if self.rank == 0:
            self._write_state({"state": state, "step": step})

    def fail(self, error: BaseException) -> None:
        """Any rank writes why the run ended, and which rank the others waited for. The first rank to fail
        since this start wins: the others fail because of it. Where a wrong input or a signal ends the
        start before it can train, a new folder is removed, and another has the state that it had."""
        if self._refused:
            return  # the folder is another start's
        if not self.confirmed and isinstance(error, (InputError, KeyboardInterrupt)):
            if self.rank == 0 and self.is_new:
                shutil.rmtree(self.path, ignore_errors=True)
            elif self.rank == 0 and self.earlier:
                write_atomic(self.path / "state.json", json.dumps(self.earlier) + "\n")
            return
        known = self._state()
        if not known and self.rank != 0:
            return  # rank 0 has removed the folder
        failed = known.get("state") in ("oom", "failed", "timeout")
        # A rank that has lost its peer may write before that peer has; and this one a second time.
        failed = failed and known["time"] >= self.started and known.get("rank") != self.rank
        lost = is_lost_peer(error)
        if failed and (lost or not known.get("error", "").startswith(LOST_PEER)):
            return
        why = LOST_PEER if lost else without_secrets(sentence_of(error))
        state = {"state": failure_state(error), "step": self.step, "error": why}
        try:
            self._write_state(state | {"rank": self.rank})
        except OSError as full:
            logger.error(f"{self.path}/state.json could not be written ({full.strerror})")

    def _write_state(self, row: dict[str, Any]) -> None:
        # The last step with a complete checkpoint, so that a run without any knows that it had one.
        saved = {} if self.saved_step is None else {"saved_step": self.saved_step}
        row |= saved | {"pid": os.getpid(), "host": platform.node(), "time": time.time()}
        write_atomic(self.path / "state.json", json.dumps(row) + "\n")
