"""Runs of grids that end at once, in place of training processes."""

import json
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_tts.grids.grid_file import read_grid
from titan_tts.grids.grid_run import GridRun
from titan_tts.launch.supervisor import Outcome

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "train_configs" / "debug.toml"

AXES = """
[axes]
layout = ["ddp", "fsdp"]
batch = [1, 2, 4]
"""


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


def train(config: Any, folder: Path) -> tuple[str, str]:
    """Two ranks with `seed` times their samples above 4 run out of memory; of seed 7 those with more than 40 samples, and
    after the steps of a trial with more than 35."""
    training, seed = config["training"], config["debug"].get("seed", 0)
    with open(folder.parent / "order.txt", "a") as file:
        file.write(f"{folder.name}\n")
    if seed == 3:
        return "failed", "why"
    needed, memory = training["local_batch_size"] * seed, 4
    if seed == 7:
        memory = 7 * (35 if config["benchmark"]["steps"] > 1 else 40)
    if needed > memory:
        return "oom", "no memory"
    write_report(folder, training["local_batch_size"] * 2.0)
    return "completed", ""


def start(folder: Path, axes: str = AXES, options: str = "", retried=()) -> GridRun:
    path = folder / "mine.toml"
    path.write_text(
        f'[grid]\nconfig = "{DEBUG}"\ndump_folder = "{folder}"\ngpus = 2\n{options}\n{axes}'
    )
    return GridRun(read_grid(path), set(retried))


def states(run: GridRun) -> dict[str, str]:
    return {cell.name: run.record(cell)["state"] for cell in run.all}


def order(folder: Path) -> list[str]:
    return (folder / "mine" / "order.txt").read_text().split()
