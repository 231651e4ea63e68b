"""Metrics of a training run: loss, exact FLOPs and MFU, goodput, waste, memory, progress.

MFU is exact-FLOPs MFU: training FLOPs of the executed (padded) shapes without recomputation, as
`torch.utils.flop_counter` counts them, over the device's dense bf16 peak. Goodput MFU counts the
real lengths only.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import (
    Lengths,
    text_encoder_flops,
    training_flops,
)
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

_PEAK_TFLOPS = {  # dense bf16, from the vendors' datasheets; the first name found in the device's wins
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
    """Dense bf16 peak of one device in FLOP/s; None where it is not known."""
    if peak_tflops > 0:
        return peak_tflops * 1e12
    for name, tflops in _PEAK_TFLOPS.items():
        if re.search(rf"\b{name}\b", device_name):  # an RTX A1000 is no A100
            return tflops * 1e12
    return None


class _TensorBoard(BaseLogger):
    """One folder a run; a resume hides the steps that it trains again."""

    def __init__(self, folder: str, resumed_step: int):
        self.writer = SummaryWriter(folder, purge_step=resumed_step + 1)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


def eta(seconds: float) -> str:
    """A duration as h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


class TTSMetricsProcessor(MetricsProcessor):
    """Upstream's processor with figures for padded batches of speech.

    `count` is called for each micro-batch; `log` sums over ranks what was counted since the last.
    """

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: DiTTTSModelArgs
    ):
        without_tensorboard = replace(job_config.metrics, enable_tensorboard=False)
        super().__init__(replace(job_config, metrics=without_tensorboard), parallel_dims)
        self.job_config = job_config
        self.model_args = model_args
        self.peak = peak_flops(
            self.device_memory_monitor.device_name, job_config.metrics.peak_tflops
        )
        self.total_steps = job_config.training.steps  # a benchmark corrects it as it goes
        self.shapes: Counter[tuple[int, int, int, int]] = Counter()
        self.compiles = 0
        self.metrics_file: JsonLines | None = None
        self.first_step = 0
        self.start_time = time.perf_counter()
        self._most_reserved_gib = 0.0
        self._reset()

    def _reset(self) -> None:
        self.executed_flops = 0
        self.useful_flops = 0
        self.samples = 0
        self.valid_frames = 0
        self.padded_frames = 0
        self.replaced_samples = 0
        self.last_logged_step = getattr(self, "last_logged_step", 0)

    def start(self, resumed_step: int, tensorboard_folder: str, metrics_file: JsonLines) -> None:
        """Called once the checkpoint is loaded, on every rank."""
        self.first_step = self.last_logged_step = resumed_step
        self.start_time = self.time_last_log = time.perf_counter()
        if self.peak is None:
            logger.info(
                "No MFU: the peak of this device is not known; [metrics] peak_tflops would give it"
            )
        else:
            logger.info(
                f"MFU: exact training FLOPs of the padded shapes (goodput: of the real lengths), without "
                f"recomputation, over {self.peak / 1e12:.0f} dense bf16 TFLOP/s"
            )
        if torch.distributed.get_rank() != 0:
            return
        self.metrics_file = metrics_file
        if self.job_config.metrics.enable_tensorboard:
            loggers = LoggerContainer()
            loggers.add_logger(self.logger)
            loggers.add_logger(_TensorBoard(tensorboard_folder, resumed_step))
            self.logger = loggers

    def should_log(self, step: int) -> bool:
        """Also at every step that is saved: a checkpoint is made of finite weights only."""
        checkpoint = self.job_config.checkpoint
        saved = checkpoint.enable and step % checkpoint.interval == 0
        return super().should_log(step) or saved or step == self.total_steps

    def count(
        self,
        shape: tuple[int, int, int, int],
        frames: list[int],
        text_tokens: list[int],
        speaker_frames: list[int],
        replaced: int = 0,
        text_rows: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Takes note of a micro-batch.

        Args:
            shape: padded (samples, frames, text tokens, speaker frames).
            frames, text_tokens, speaker_frames: real lengths of each sample.
            replaced: damaged samples that another one stands for.
            text_rows: (rows, tokens) of each pass through a pretrained text encoder.
        """
        batch, padded, text, speaker = shape
        self.shapes[shape] += 1
        self.executed_flops += batch * training_flops(
            self.model_args, Lengths(padded, text, speaker)
        )
        self.useful_flops += sum(
            training_flops(self.model_args, Lengths(*lengths))
            for lengths in zip(frames, text_tokens, speaker_frames)
        )
        encoder = self.model_args.text_encoder_sizes
        if encoder is not None:
            self.executed_flops += sum(text_encoder_flops(encoder, *rows) for rows in text_rows)
            # Conditioning tokens have no part in it; they are too few to tell them apart here.
            self.useful_flops += sum(text_encoder_flops(encoder, 1, n) for n in text_tokens)
        self.samples += batch
        self.valid_frames += sum(frames)
        self.padded_frames += batch * padded
        self.replaced_samples += replaced

    def most_reserved_gib(self) -> float:
        """Most device memory that this rank has reserved in its life, in GiB."""
        now = self.device_memory_monitor.get_peak_stats().max_reserved_gib
        return max(self._most_reserved_gib, now)

    def _global_sums(self) -> list[float]:
        sums = torch.tensor(
            [
                self.executed_flops,
                self.useful_flops,
                self.samples,
                self.valid_frames,
                self.padded_frames,
                self.replaced_samples,
            ],
            dtype=torch.float64,
            device=device_type,
        )
        mesh = self.parallel_dims.get_optional_mesh("batch")
        if mesh is not None:
            torch.distributed.all_reduce(sums, group=mesh.get_group())
        return sums.tolist()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        if not (math.isfinite(global_avg_loss) and math.isfinite(grad_norm)):
            raise InputError(
                f"step {step}: loss {global_avg_loss}, gradient norm {grad_norm}; the run ends before a "
                f"checkpoint is made of it: lower [optimizer] lr or look at the data"
            )
        now = time.perf_counter()
        seconds = now - self.time_last_log
        executed, useful, samples, valid, padded, replaced = self._global_sums()
        devices = self.parallel_dims.world_size
        memory = self.device_memory_monitor.get_peak_stats()
        self._most_reserved_gib = max(self._most_reserved_gib, memory.max_reserved_gib)
        steps = step - self.last_logged_step
        total = self.total_steps
        lr = (extra_metrics or {}).get("lr")
        remaining = (total - step) * (now - self.start_time) / (step - self.first_step)
        metrics: dict[str, Any] = {
            "loss": global_avg_loss,
            "grad_norm": grad_norm,
            "samples_per_second": samples / seconds,
            "audio_seconds_per_second": valid / self.job_config.data.frames_per_second / seconds,
            "padded_frames_per_second": padded / seconds,
            "tflops_per_device": executed / seconds / devices / 1e12,
            "padding_fraction": 1.0 - valid / padded,
            "replaced_samples": int(replaced),
            "compiled_shapes": len(self.shapes),
            "compiles": self.compiles,
            "seconds_per_step": seconds / steps,
            "data_loading_fraction": sum(self.data_loading_times) / seconds,
            "peak_memory_gib": memory.max_reserved_gib,
            "peak_allocated_gib": memory.max_active_gib,
            "progress": step / total,
            "eta_seconds": remaining,
            # None on a device whose peak is not known: an MFU against a guessed peak is no figure.
            "mfu": self.peak and executed / seconds / devices / self.peak,
            "goodput_mfu": self.peak and useful / seconds / devices / self.peak,
            "lr": None if lr is None else float(lr),  # torchao's is a tensor
        }
        self.logger.log(metrics, step)
        if self.metrics_file is not None:
            self.metrics_file.append({"step": step, "time": time.time(), **metrics})

        mfu = (
            f"mfu: {metrics['mfu']:.1%} (goodput {metrics['goodput_mfu']:.1%})"
            if self.peak is not None
            else f"{metrics['tflops_per_device']:.3f} TFLOP/s"
        )
        color = self.color
        logger.info(
            f"{color.red}step: {step}/{total} ({step / total:.0%})  "
            f"{color.green}loss: {global_avg_loss:.5f}  "
            f"{color.orange}grad_norm: {grad_norm:.4f}  "
            f"{color.turquoise}memory: {memory.max_reserved_gib:.2f}GiB  "
            f"{color.blue}{metrics['audio_seconds_per_second']:.0f} audio-s/s  "
            f"{color.cyan}waste: {metrics['padding_fraction']:.0%}  "
            f"{color.magenta}{mfu}{color.reset}  ETA {eta(remaining)}"
        )
        self.last_logged_step = step
        self._reset()
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()


def build_tts_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: DiTTTSModelArgs
) -> TTSMetricsProcessor:
    return TTSMetricsProcessor(job_config, parallel_dims, model_args)
