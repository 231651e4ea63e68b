"""Metrics of a training run: loss, throughput, MFU and goodput MFU, padding, memory, power, progress.

MFU is the training FLOPs of the padded shapes without recomputation, as `torch.utils.flop_counter`
counts them, over the device's dense bf16 peak. Goodput MFU counts the real lengths only.
"""

import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.infra.collectives import sum_over_samples
from torchtitan.models.dit_tts.infra.device_time import HostCopy, moment, seconds_between
from torchtitan.models.dit_tts.infra.divergence import StepStats
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import MicroBatch, executed_flops, useful_flops
from torchtitan.models.dit_tts.run.trackers import Trackers
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

_PEAK_TFLOPS = {  # dense bf16, from the vendors' datasheets; the first name that the device's contains wins
    "A100": 312.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
}


def peak_flops(device_name: str, peak_tflops: float) -> float | None:
    """Dense bf16 peak of one device in FLOP/s; None if it is not known."""
    if peak_tflops > 0:
        return peak_tflops * 1e12
    for name, tflops in _PEAK_TFLOPS.items():
        # An RTX A1000 is no A100, and a slice of one (MIG) has a part of its peak.
        if re.search(rf"\b{name}\b", device_name) and "MIG" not in device_name:
            return tflops * 1e12
    return None


_TRAIN = (
    "grad_norm lr padding_fraction text_padding_fraction reference_padding_fraction replaced_samples "
    "skipped_batches progress"
).split()
"""Metrics of the group `train/`; all others but the loss are of `speed/`"""

_STREAMS = {"": "frames", "text_": "text_tokens", "reference_": "reference_frames"}
_OF_GPU = ("power_watts", "utilization", "memory_used_gib")
_COUNTED = (
    *("executed_flops", "useful_flops", "samples", "replaced_samples", "gpus", *_OF_GPU),
    *(f"{kind}_{unit}" for kind in ("valid", "padded") for unit in _STREAMS.values()),
)
"""Sums over micro-batches since the last logged step; `gpus`: those that give the values of `_OF_GPU`"""


def gpu_use() -> dict[str, float]:
    """Power, the fraction of the last second or less in which any kernel ran, and memory, of this process's GPU by all
    processes. Empty without one, its driver, or its vendor's library (nvidia-ml-py)."""
    if not torch.cuda.is_available():
        return {}
    try:
        return {
            "power_watts": torch.cuda.power_draw() / 1000,
            "utilization": torch.cuda.utilization() / 100,
            "memory_used_gib": torch.cuda.device_memory_used() / 2**30,
        }
    except Exception:  # the libraries have errors of their own, and such figures end no run
        return {}


def eta(seconds: float) -> str:
    """A duration as h:mm:ss, with days where it has some."""
    return str(timedelta(seconds=int(seconds)))


@dataclass
class _Collected:
    """Values that a step logs in addition to its loss, of this rank since the last logged step, and the counts of all ranks on
    their way to the host."""

    step: int
    lr: float | torch.Tensor
    counts: Counter[str]
    of_all_ranks: HostCopy
    moment: Any


class TTSMetricsProcessor(MetricsProcessor):
    """Upstream's processor with metrics for padded batches of speech.

    `count` is called for each micro-batch, `collect` at the end of a step to be logged, and `log` when the
    host has the step's loss: on a GPU in the next step, whose work is queued by then.
    """

    job_config: JobConfig

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: DiTTTSModelArgs
    ):
        # Ours are opened in `start`, once the step is known; and a log file needs no colors.
        plain = job_config.metrics.disable_color_printing or not sys.stderr.isatty()
        metrics = replace(
            job_config.metrics,
            enable_tensorboard=False,
            enable_wandb=False,
            disable_color_printing=plain,
        )
        super().__init__(replace(job_config, metrics=metrics), parallel_dims)
        self.job_config = job_config
        self.model_args = model_args
        self.peak = peak_flops(
            self.device_memory_monitor.device_name, job_config.metrics.peak_tflops
        )
        self.total_steps = job_config.training.steps
        self.counts: Counter[str] = Counter()
        self._collected: _Collected | None = None
        self.compiles = 0
        self.skipped_batches = 0
        self.metrics_file: JsonLines | None = None
        self.trackers: Trackers | None = None
        """on rank 0, from `start` on"""
        self.first_step = self.last_logged_step = 0
        self.start_time = time.perf_counter()
        self._last_moment = moment()
        self._excluded_seconds = 0.0
        self._max_memory_gib = 0.0, 0.0

    def start(self, resumed_step: int, folder: Path, metrics_file: JsonLines) -> None:
        """Called once a checkpoint is loaded, on every rank. `folder`: the run's, with config.toml
        and env.json.
        """
        self.counts, self._collected = Counter(), None
        self.data_loading_times.clear()
        self.first_step = self.last_logged_step = resumed_step
        self.start_time, self._last_moment = time.perf_counter(), moment()
        self._excluded_seconds = 0.0
        if self.metrics_file is not None or resumed_step >= self.total_steps:
            pass  # said already, or nothing is left to measure
        elif self.peak is None:
            logger.info(
                "No MFU: the peak of this device is not known; set [metrics] peak_tflops to get it"
            )
        else:
            logger.info(
                f"MFU: exact training FLOPs of the padded shapes (goodput: of the real lengths), without "
                f"recomputation, over {self.peak / 1e12:.0f} dense bf16 TFLOP/s"
            )
        if torch.distributed.get_rank() != 0:
            return
        self.metrics_file = metrics_file
        if self.trackers is None:
            self.trackers = Trackers(self.job_config, folder)
        self.trackers.continue_after(resumed_step)

    def close(self) -> None:
        """Ends the trackers."""
        if self.trackers is not None:
            self.trackers.close()

    def should_log(self, step: int) -> bool:
        """Every step that is saved or validated is logged too."""
        return super().should_log(step) or self._is_used(step)

    def logs_at_once(self, step: int) -> bool:
        """True if the host waits for this step: what follows it waits too, or there is nothing to wait for."""
        return device_type == "cpu" or step == self.first_step + 1 or self._is_used(step)

    def _is_used(self, step: int) -> bool:
        checkpoint, validation = self.job_config.checkpoint, self.job_config.validation
        saved = checkpoint.enable and step % checkpoint.interval == 0
        freqs = (validation.freq, self.job_config.samples.freq) if validation.enable else ()
        validated = any(freq and step % freq == 0 for freq in freqs)
        return saved or validated or step == self.total_steps

    def count(self, batch: MicroBatch, replaced: int = 0) -> None:
        """Adds a micro-batch. `replaced`: corrupt samples that another sample replaces, or that a
        packed batch lacks.
        """
        rows, *padded = batch.shape
        self.counts.update(
            executed_flops=executed_flops(self.model_args, batch),
            useful_flops=useful_flops(self.model_args, batch),
            samples=len(batch.lengths),
            replaced_samples=replaced,
        )
        valid = map(sum, zip(*batch.lengths, strict=True))
        for unit, real, size in zip(_STREAMS.values(), valid, padded):  # captions are not counted
            self.counts.update({f"valid_{unit}": real, f"padded_{unit}": rows * size})

    def exclude_time(self, seconds: float) -> None:
        """Excludes seconds, such as validation's, from the throughput."""
        self._excluded_seconds += seconds

    def max_memory_gib(self) -> tuple[float, float]:
        """Maximum device memory that this rank has (allocated, reserved) since the process started, in
        GiB."""
        now = self.device_memory_monitor.get_peak_stats()
        allocated, reserved = self._max_memory_gib
        return max(allocated, now.max_active_gib), max(reserved, now.max_reserved_gib)

    def collect(self, step: int, lr: float | torch.Tensor) -> None:
        """Begins the log of a step, without a wait for the device. `lr`: of the first optimizer; torchao's is a
        tensor."""
        if use := gpu_use():
            self.counts.update(Counter(use | {"gpus": 1}))
        counts, self.counts = self.counts, Counter()
        counts["loading_seconds"] += sum(self.data_loading_times)  # type: ignore[assignment]
        self.data_loading_times.clear()
        counted = [float(counts[name]) for name in _COUNTED]
        pinned = torch.tensor(counted, dtype=torch.float64, pin_memory=device_type == "cuda")
        sums = sum_over_samples(pinned.to(device_type, non_blocking=True), self.parallel_dims)
        now = moment()  # before the copy, so that it has come when the copy is there
        self._collected = _Collected(step, lr, counts, HostCopy(sums), now)

    def log(self, stats: StepStats) -> None:  # type: ignore[override]
        """Logs the collected step, if there is one and `stats` are its own; replaces upstream's. What a bad step has
        collected counts for the next one."""
        collected, self._collected = self._collected, None
        if collected is None:
            return
        if stats.bad:
            self.counts.update(collected.counts)
            return
        step = collected.step
        counts = dict(zip(_COUNTED, collected.of_all_ranks.read(), strict=True))
        seconds = seconds_between(self._last_moment, collected.moment) - self._excluded_seconds
        gpus, devices = counts["gpus"] or None, self.parallel_dims.world_size
        memory = self.device_memory_monitor.get_peak_stats()
        self._max_memory_gib = self.max_memory_gib()
        total = self.total_steps
        mean_seconds = (time.perf_counter() - self.start_time) / (step - self.first_step)
        audio_seconds = counts["valid_frames"] / self.job_config.data.frames_per_second
        executed = counts["executed_flops"] / seconds / devices
        useful = counts["useful_flops"] / seconds / devices
        metrics: dict[str, Any] = {
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            "samples_per_second": counts["samples"] / seconds,
            "audio_seconds_per_second": audio_seconds / seconds,
            "tflops_per_device": executed / 1e12,
            **{
                f"{stream}padding_fraction": 1.0
                - counts[f"valid_{unit}"] / counts[f"padded_{unit}"]
                for stream, unit in _STREAMS.items()
            },
            "replaced_samples": int(counts["replaced_samples"]),
            "skipped_batches": self.skipped_batches,
            "compiles": self.compiles,
            "seconds_per_step": seconds / (step - self.last_logged_step),
            "data_loading_fraction": collected.counts["loading_seconds"] / seconds,
            "peak_memory_gib": memory.max_reserved_gib,
            "peak_allocated_gib": memory.max_active_gib,
            "progress": step / total,
            "eta_seconds": (total - step) * mean_seconds,
            # None without a known peak: an MFU against a guessed peak means nothing.
            "mfu": self.peak and executed / self.peak,
            "goodput_mfu": self.peak and useful / self.peak,
            "lr": float(collected.lr),
            **{f"gpu_{name}": gpus and counts[name] / gpus for name in _OF_GPU},
        }
        if self.trackers is not None:
            groups = {"loss": "", **dict.fromkeys(_TRAIN, "train/")}
            self.trackers.log({f"{groups.get(n, 'speed/')}{n}": metrics[n] for n in metrics}, step)
        if self.metrics_file is not None:
            self.metrics_file.append({"step": step, "time": time.time(), **metrics})
        self._print(step, metrics)
        self.last_logged_step = step
        self._last_moment, self._excluded_seconds = collected.moment, 0.0
        self.device_memory_monitor.reset_peak_stats()

    def _print(self, step: int, metrics: dict[str, Any]) -> None:
        mfu = (
            f"mfu: {metrics['mfu']:.1%} (goodput {metrics['goodput_mfu']:.1%})"
            if self.peak is not None
            else f"{metrics['tflops_per_device']:.3f} TFLOP/s"
        )
        color = self.color
        logger.info(
            f"{color.red}step: {step}/{self.total_steps} ({metrics['progress']:.0%})  "
            f"{color.green}loss: {metrics['loss']:.5f}  "
            f"{color.orange}grad_norm: {metrics['grad_norm']:.4f}  "
            f"{color.turquoise}memory: {metrics['peak_memory_gib']:.2f}GiB  "
            f"{color.blue}{metrics['audio_seconds_per_second']:.0f} audio-s/s  "
            f"{color.cyan}padding: {metrics['padding_fraction']:.0%}  "
            f"{color.magenta}{mfu}{color.reset}  ETA {eta(metrics['eta_seconds'])}"
        )
