"""Runs of grids that end at once, in place of training processes."""

import json
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_tts.launch.supervisor import Outcome


class InstantRun:
    """In place of `RunProcess`; `train` gets the config and the folder, and returns state and reason."""

    def __init__(self, train: Callable[[Any, Path], tuple[str, str]], folder: Path):
        config = tomllib.loads((folder / "config.toml").read_text())
        state, reason = train(config, folder)
        self._outcome = Outcome(state, reason, 0.01)
        written = {"state": state, "time": time.time(), "error": reason}
        (folder / "state.json").write_text(json.dumps(written))

    def completed(self) -> bool:
        return self._outcome.state == "completed"

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        return True

    def end(self, grace_seconds: float) -> None:
        pass

    def outcome(self) -> Outcome:
        return self._outcome


def write_report(folder: Path, samples_per_second: float) -> None:
    """The figures that a grid shows of a benchmark."""
    report = {"samples_per_second": samples_per_second, "mfu": None, "peak_reserved_gib": 1.0}
    (folder / "benchmark.json").write_text(json.dumps(report))
