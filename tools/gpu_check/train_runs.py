"""Starts train.py as a user would, within a stage's time, and reads what the run leaves."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu_check.items import NotMeasured
from tools.gpu_check.settings import ROOT, Settings

_CONFIGS = {
    "debug": "debug.toml",
    "800M": "dit_tts_800m.toml",
    "3B": "dit_tts_3b.toml",
    "8B": "dit_tts_8b.toml",
}

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class OutOfMemoryError(Exception):
    """The run ended for want of device memory: a result."""


def config_of(flavor: str) -> str:
    return str(ROOT / "train_configs" / _CONFIGS[flavor])


def start(settings: Settings, flavor: str, name: str, arguments: list[str]) -> subprocess.Popen:
    """Starts a run in the folder `work/runs/name`; its output goes to a log beside."""
    runs = settings.folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "train.py"), "--job.config_file", config_of(flavor)]
    command += ["--job.dump_folder", str(runs), "--job.experiment", name, *arguments]
    environment = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as scripts/train_tts.sh has it
        **{key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES},
    }
    with open(runs / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def wait(
    settings: Settings,
    process: subprocess.Popen,
    until: Callable[[], bool] | None = None,
) -> None:
    """Waits for the end of a run, or until something holds of it, when it is killed.

    Raises:
        NotMeasured: the stage's time was over first; the run is killed.
    """
    try:
        while process.poll() is None and not (until is not None and until()):
            if time.time() > settings.deadline:
                raise NotMeasured("time: the stage's time was over before the run had ended")
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


def finished(settings: Settings, flavor: str, name: str, arguments: list[str]) -> Path:
    """Folder of a run that has ended well; one that an earlier stage made is not made again.

    A run is finished as soon as its state is completed: what it does after that, a plan beside what was
    measured, nobody reads here.

    Raises:
        OutOfMemoryError: it ended in the state oom.
        RuntimeError: it failed, with the run's own words.
    """
    folder = settings.folder / "runs" / name

    def completed() -> bool:
        return _state(folder).get("state") == "completed"

    if completed():
        return folder
    process = start(settings, flavor, name, arguments)
    wait(settings, process, until=completed)
    if completed():
        return folder
    state = _state(folder)
    if state.get("state") == "oom":
        raise OutOfMemoryError(state.get("error", "")[:200])
    raise RuntimeError(f"run {name} ended with status {process.returncode}: {_last_words(folder)}")


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


def _state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "state.json").read_text())
    except (OSError, ValueError):
        return {}


def _last_words(folder: Path) -> str:
    log = folder.with_name(f"{folder.name}.log").read_text(errors="replace")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["it printed nothing"])[-1][:300]
