"""Starts train.py as a user would, within a stage's time, and reads what the run leaves."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_tts.launch.supervisor import RunProcess, train_command
from tools.gpu_check.items import NotMeasured
from tools.gpu_check.settings import ROOT, Settings
from torchtitan.models.dit_tts.bounded import read_json

_CONFIGS = {
    "debug": "debug.toml",
    "800M": "dit_tts_800m.toml",
    "3B": "dit_tts_3b.toml",
    "8B": "dit_tts_8b.toml",
}


class OutOfMemoryError(Exception):
    """The run ended for want of device memory: a result."""


def config_of(flavor: str) -> str:
    return str(ROOT / "train_configs" / _CONFIGS[flavor])


def start(settings: Settings, flavor: str, name: str, arguments: list[str]) -> RunProcess:
    """Starts a run in the folder `work/runs/name`; its output goes to a log beside."""
    runs = settings.folder / "runs"
    place = ["--job.dump_folder", str(runs), "--job.experiment", name]
    command = train_command(config_of(flavor), 1, [*place, *arguments])
    return RunProcess(command, runs / name, runs / f"{name}.log")


def wait(settings: Settings, run: RunProcess, until: Callable[[], bool] = lambda: False) -> None:
    """Waits for the end of a run, or until something holds of it, when it is killed.

    Raises:
        NotMeasured: the stage's time was over first; the run is killed.
    """
    try:
        if not run.wait(settings.deadline - time.time(), until):
            raise NotMeasured("time: the stage's time was over before the run had ended")
    finally:
        run.end()


def finished(settings: Settings, flavor: str, name: str, arguments: list[str]) -> Path:
    """Folder of a run that has ended well; one that an earlier stage made is not made again.

    A run is finished as soon as its state is completed: what it does after that, a plan beside what was
    measured, nobody reads here.

    Raises:
        OutOfMemoryError: it ended in the state oom.
        RuntimeError: it failed, with its error.
    """
    folder = settings.folder / "runs" / name
    if read_json(folder / "state.json").get("state") == "completed":
        return folder
    run = start(settings, flavor, name, arguments)
    wait(settings, run, until=run.completed)
    outcome = run.outcome()
    if outcome.state == "oom":
        raise OutOfMemoryError(outcome.reason[:200])
    if outcome.state != "completed":
        raise RuntimeError(f"run {name}: {outcome.state}: {outcome.reason}")
    return folder


def sizes(micro_batch: int) -> list[str]:
    """Arguments of a run whose global batch is one micro-batch, without EMA."""
    return [
        f"--training.local_batch_size={micro_batch}",
        f"--training.global_batch_size={micro_batch}",
        f"--data.batch_multiple={micro_batch}",
        "--ema.no-enable",
    ]


def benchmark(
    settings: Settings, flavor: str, micro_batch: int, lengths: str, arguments: list[str]
) -> dict[str, Any]:
    """What a run in benchmark mode reports.

    Args:
        micro_batch: samples of the longest bucket; the global batch is one micro-batch.
        lengths: of [benchmark].

    Returns:
        Its benchmark.json.
    """
    name = f"{flavor}_{lengths}_{micro_batch}"
    if arguments:
        name += "_" + "_".join(
            a.split(".")[-1].replace("=", "_") for a in arguments if a[:2] == "--"
        )
    steps, warm_up = (3, 1) if settings.tiny else (12, 3)
    sized = [
        "--benchmark.enable",
        f"--benchmark.steps={steps if lengths == 'longest' else 4 * steps}",
        f"--benchmark.warmup_steps={warm_up}",
        f"--benchmark.lengths={lengths}",
        "--metrics.no-enable-tensorboard",
        "--metrics.log_freq=1000",
        *sizes(micro_batch),
        *arguments,
    ]
    folder = finished(settings, flavor, name, sized)
    return json.loads((folder / "benchmark.json").read_text())


def losses(folder: Path) -> dict[int, float]:
    """Of each logged step."""
    return {row["step"]: row["loss"] for row in _metrics(folder)}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """A row a logged step; a line that a kill cut short is left out."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]
