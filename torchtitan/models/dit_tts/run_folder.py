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
from torchtitan.tools import utils

STATES = ("init", "running", "completed", "oom", "failed", "timeout")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces a file at once: a reader or a crash sees the old content or the new, nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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


def environment() -> dict[str, Any]:
    """Versions, device and git commit of this process."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for package in ("torch", "torchtitan", "numpy", "transformers", "torchao"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": utils.device_module.get_device_name(),
        "device_type": utils.device_type,
        "cpu_threads": torch.get_num_threads(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "git_commit": _git_commit(),
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class LineFile:
    """A file of one JSON object a line, each with its `step`."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All whole lines. A line that a kill cut short is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().split("\n")[:-1]:
            rows.append(json.loads(line))
        return rows

    def keep_until(self, step: int) -> None:
        """Drops lines of steps after `step`, which a resumed run trains again."""
        if self.path.exists():
            kept = [json.dumps(row) + "\n" for row in self.read() if row["step"] <= step]
            write_atomic(self.path, "".join(kept))

    def append(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            file.write((json.dumps(row) + "\n").encode())


class RunFolder:
    """Writes the run's folder; see the README's "A run's folder"."""

    def __init__(self, path: Path, rank: int):
        self.path = path
        self.rank = rank
        self.metrics = LineFile(path / "metrics.jsonl")
        self.audit = LineFile(path / "audit" / f"rank{rank}.jsonl")

    def start(self, config: JobConfig, replace: bool = False) -> None:
        """Writes config and environment and, before anything is built, the state `init`.

        What an earlier life of the run left is only replaced once this one is known to work.
        """
        if self.rank == 0 and (replace or not (self.path / "config.toml").exists()):
            write_atomic(self.path / "config.toml", tomli_w.dumps(_without_none(asdict(config))))
            write_atomic(self.path / "env.json", json.dumps(environment(), indent=2) + "\n")
            (self.path / "samples").mkdir(exist_ok=True)
        if not replace:
            self.set_state("init", step=0)

    def resume_at(self, step: int) -> None:
        """Brings the line files back to the state they had when `step` was saved."""
        if self.rank == 0:
            self.metrics.keep_until(step)
            for audit in (self.path / "audit").glob("rank*.jsonl"):
                LineFile(audit).keep_until(step)

    def set_state(self, state: str, step: int, **details: Any) -> None:
        """Writes state.json: one of STATES, the last step and when."""
        assert state in STATES
        if self.rank == 0:
            row = {"state": state, "step": step, "pid": os.getpid(), "time": time.time(), **details}
            write_atomic(self.path / "state.json", json.dumps(row) + "\n")
