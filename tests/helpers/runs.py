"""Starts real training runs for the integration tests and reads what they leave behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torchtitan.models.dit_tts.run_folder import LineFile

ROOT = Path(__file__).resolve().parents[2]

# Small enough that a run's time is its start; float32, so that equal means equal.
TINY = [
    "--training.local_batch_size=8",
    "--training.global_batch_size=8",
    "--training.mixed_precision_param=float32",
    "--data.batch_multiple=8",
    "--data.num_buckets=2",
    "--metrics.log_freq=1",
    "--metrics.no-enable-tensorboard",
    "--lr_scheduler.warmup_steps=2",
    "--debug.seed=7",
]


@dataclass
class Run:
    """A training process to be waited for or killed; its folder is dump_folder/experiment."""

    process: subprocess.Popen
    folder: Path
    log: Path

    def wait(self, timeout_seconds: float = 240) -> int:
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL to every process of the run at once, as a machine that dies would."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def metrics(self) -> dict[int, dict]:
        rows = LineFile(self.folder / "metrics.jsonl").read()
        assert len({row["step"] for row in rows}) == len(rows), "a step was logged twice"
        return {row["step"]: row for row in rows}

    def audited_ids(self, ranks: int) -> dict[int, list[str]]:
        """Sample ids of each step over all ranks, sorted."""
        ids: dict[int, list[str]] = {}
        for rank in range(ranks):
            for row in LineFile(self.folder / "audit" / f"rank{rank}.jsonl").read():
                ids.setdefault(row["step"], []).extend(row["ids"])
        return {step: sorted(names) for step, names in ids.items()}


def start(dump_folder: Path, experiment: str, arguments: list[str], processes: int = 1) -> Run:
    """Starts train.py, under torchrun for several processes, in a process group of its own."""
    log = dump_folder / f"{experiment}.{time.monotonic_ns()}.log"
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torchtitan.models.dit_tts.launch", "--nproc_per_node", str(processes)]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command += [str(ROOT / "train.py"), "--job.config_file", str(ROOT / "train_configs/debug.toml")]
    command += ["--job.dump_folder", str(dump_folder), "--job.experiment", experiment, *arguments]
    # The bars are for float32 on the CPU, and a machine may have fewer accelerators than processes.
    # Each process of a pool of compilers would first import torch.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(process, dump_folder / experiment, log)


def run(dump_folder: Path, experiment: str, arguments: list[str], processes: int = 1) -> Run:
    """Starts a run and waits for its success."""
    started = start(dump_folder, experiment, arguments, processes)
    status = started.wait()
    assert status == 0, f"exit status {status}:\n{started.log.read_text()[-4000:]}"
    return started
