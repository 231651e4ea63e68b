"""A run's folder: resolved config, environment, state and line files, which tools read.

Only rank 0 writes, except for the audit files, one a rank. Files that are replaced are written
beside, synced and renamed; line files are appended to, a whole line in one write.
"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
import torch

from torchtitan.config import JobConfig
from torchtitan.models.dit_tts.files import JsonLines, write_atomic
from torchtitan.tools import utils

_VARIABLES = ("CUDA_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "TRITON_")
"""How names of environment variables begin that change what a run computes or how fast"""

STATES = ("init", "running", "completed", "oom", "failed", "timeout")


def _without_none(value: Any) -> Any:
    """TOML has no null: a missing key stands for None."""
    if isinstance(value, dict):
        return {key: _without_none(v) for key, v in value.items() if v is not None}
    return value


def _git_commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def gpus_per_node() -> int:
    """Processes of this run on this machine, as torchrun says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _driver() -> str | None:
    """The NVIDIA kernel module's own words, its version among them."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
    except OSError:
        return None


def _cuda() -> dict[str, str | None]:
    """Versions of the libraries that torch was built with, and of the driver; None: not here."""
    nccl = cudnn = None
    if torch.cuda.is_available():
        cudnn = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"cuda": torch.version.cuda, "cudnn": cudnn, "nccl": nccl, "driver": _driver()}


def environment() -> dict[str, Any]:
    """Versions, device, settings of torch's by variables, and git commit of this process."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for package in ("torch", "torchtitan", "numpy", "transformers", "torchao"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        **_cuda(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": utils.device_module.get_device_name(),
        "device_type": utils.device_type,
        "cpu_threads": torch.get_num_threads(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "gpus_per_node": gpus_per_node(),
        "git_commit": _git_commit(),
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class RunFolder:
    """Writes the run's folder; see the README's "A run's folder"."""

    def __init__(self, path: Path, rank: int, config: JobConfig):
        self.path = path
        self.rank = rank
        self.config = config
        self.started = time.time()
        self.step = 0
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.audit = JsonLines(path / "audit" / f"rank{rank}.jsonl")

    def start(self) -> None:
        """Writes the state `init` and, in a new folder, config and environment."""
        self.step = self._state().get("step", 0)
        if self.rank == 0 and not (self.path / "config.toml").exists():
            self.confirm()
        self.set_state("init", self.step)

    def confirm(self) -> None:
        """Writes config and environment. Called again when the checkpoint is loaded, so that what an
        earlier life left is only replaced by a life that works."""
        if self.rank == 0:
            content = tomli_w.dumps(_without_none(asdict(self.config)))
            write_atomic(self.path / "config.toml", content)
            write_atomic(self.path / "env.json", json.dumps(environment(), indent=2) + "\n")
            (self.path / "samples").mkdir(exist_ok=True)

    def _state(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / "state.json").read_text())
        except (OSError, ValueError):
            return {}

    def resume_at(self, step: int) -> None:
        """Brings the line files back to the state they had when `step` was saved."""
        if self.rank == 0:
            self.metrics.keep_until(step)
            for audit in (self.path / "audit").glob("rank*.jsonl"):
                JsonLines(audit).keep_until(step)

    def set_state(self, state: str, step: int) -> None:
        """Rank 0 writes state.json: one of STATES, the last step and when."""
        assert state in STATES
        self.step = step
        if self.rank == 0:
            self._write_state({"state": state, "step": step})

    def fail(self, state: str, error: str) -> None:
        """Any rank writes why the run ended. The first of this life's ranks to fail is kept: the
        others fail because of it."""
        known = self._state()
        if known.get("state") in ("oom", "failed", "timeout") and known["time"] >= self.started:
            return
        self._write_state({"state": state, "step": self.step, "error": error, "rank": self.rank})

    def _write_state(self, row: dict[str, Any]) -> None:
        row = {**row, "pid": os.getpid(), "time": time.time()}
        write_atomic(self.path / "state.json", json.dumps(row) + "\n")
