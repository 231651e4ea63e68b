"""Times the trainer's steps and writes benchmark.json: the results and everything needed to repeat them.

FLOPs are counted by several conventions, so that no MFU is reported without the one it was computed by.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.errors import without_secrets
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.infra.collectives import gather_from_ranks
from torchtitan.models.dit_tts.infra.compile import compiled_graphs
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.attention_backends import choose_backend
from torchtitan.models.dit_tts.model.flops import (
    Lengths,
    MicroBatch,
    executed_flops,
    language_model_flops,
    speaker_keys,
    useful_flops,
)
from torchtitan.models.dit_tts.run_folder import environment, gpus_per_node
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

FILE_NAME = "benchmark.json"

# T, Lt and Ls are a sample's latent frames, text tokens and speaker keys (reference frames after
# patching), N the trained parameters, L the decoder's blocks, D its width.
CONVENTIONS = {
    "exact": "padded shapes, as PyTorch's counter",
    "exact goodput": "real lengths only",
    "6N T": "6·N·T + 12·L·D·T² over all parameters, padded shapes",
    "6N (T+Lt+Ls)": ("6·N·S + 12·L·D·S² over all parameters with S = T + Lt + Ls, padded shapes"),
}
"""What each convention counts. The first is that of `mfu`, the second of `goodput_mfu`. The 6N rules are
those of language models: they take every parameter to work on all positions, whereas here the speaker
encoder and the projections of text and speaker work on other, fewer positions, and AdaLN once per
sample. "exact" and "exact goodput" include a pretrained text encoder that runs."""

_NOT_EXECUTED = {
    "varlen": "padded keys and frames",
    "flex": "blocks of 128 keys without a valid one",
}
"""Part of the padded shapes that an attention backend does not compute"""


def flops_by_convention(
    args: DiTTTSModelArgs, parameters: int, batches: Sequence[MicroBatch]
) -> list[int]:
    """Total FLOPs of the micro-batches by each of CONVENTIONS."""
    frames_only = all_keys = 0
    for batch in batches:
        samples, *padded = batch.shape
        lengths = Lengths(*padded)
        keys = lengths.frames + lengths.text_tokens + speaker_keys(args, lengths)
        frames_only += samples * language_model_flops(args, parameters, lengths.frames)
        all_keys += samples * language_model_flops(args, parameters, keys)
    executed = sum(executed_flops(args, batch) for batch in batches)
    useful = sum(useful_flops(args, batch) for batch in batches)
    return [executed, useful, frames_only, all_keys]


def convention_table(
    flops: Sequence[int], seconds: float, devices: int, peak: float | None
) -> list[dict[str, Any]]:
    """For each of CONVENTIONS TFLOP/s per device, MFU (None without a known peak, in FLOP/s) and the
    ratio to the exact FLOPs."""
    return [
        {
            "convention": name,
            "counts": counts,
            "flops": total,
            "tflops_per_device": total / seconds / devices / 1e12,
            "mfu": peak and total / seconds / devices / peak,
            "times_exact": total / flops[0],
        }
        for (name, counts), total in zip(CONVENTIONS.items(), flops, strict=True)
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, minimum and maximum."""
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {
        "median": float(median),
        "p10": float(p10),
        "p90": float(p90),
        "min": float(min(values)),
        "max": float(max(values)),
    }


class BenchmarkRecorder:
    """Records seconds and sizes of each step of one rank, except for the first `warm_up_steps`.

    Args:
        model_args: the model's sizes.
        parameters: number of trained parameters of the model, over all ranks.
        peak: dense bf16 peak of a device in FLOP/s, or None.
    """

    def __init__(
        self,
        job_config: JobConfig,
        model_args: DiTTTSModelArgs,
        parameters: int,
        warm_up_steps: int,
        peak: float | None,
    ):
        self.job_config = job_config
        self.model_args = model_args
        self.parameters = parameters
        self.warm_up_steps = warm_up_steps
        self.peak = peak
        self.attention = choose_backend(
            model_args.attention,
            torch.device(utils.device_type),
            TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
        )
        self.seconds: list[float] = []
        self.steps: list[list[MicroBatch]] = []
        self._last_step = job_config.training.steps
        self._batches: list[MicroBatch] = []
        self._graphs_after_warm_up = 0
        self._began = 0.0

    def count(self, batch: MicroBatch) -> None:
        """Adds a micro-batch of the current step."""
        self._batches.append(batch)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Times step `number` (from 1) between two moments at which the device is idle."""
        self._batches = []
        utils.device_module.synchronize()
        began = time.perf_counter()
        yield
        utils.device_module.synchronize()
        seconds = time.perf_counter() - began
        if number > self.warm_up_steps:
            self.seconds.append(seconds)
            self.steps.append(self._batches)
        elif number == self.warm_up_steps:
            self._graphs_after_warm_up = compiled_graphs()
            self._began = time.perf_counter()

    def remaining_steps(self, step: int) -> int:
        """Number of steps after `step`: those of [benchmark] steps, or as many as fit into what is left
        of duration_seconds at the median speed. Rank 0 decides for all."""
        benchmark = self.job_config.benchmark
        left = self._last_step - step
        if not benchmark.duration_seconds or step <= self.warm_up_steps:
            return left
        time_left = benchmark.duration_seconds - (time.perf_counter() - self._began)
        if self.seconds:
            left = min(left, max(0, int(np.ceil(time_left / np.median(self.seconds)))))
        return gather_from_ranks(left)[0]

    def finish(self, folder: Path, peak_memory_gib: float) -> dict[str, Any] | None:
        """Gathers the results of all ranks and writes benchmark.json to the run's folder.

        Args:
            peak_memory_gib: maximum memory that this rank's device has reserved.

        Returns:
            The report on rank 0, None on the others.
        """
        batches = [batch for step in self.steps for batch in step]
        mine = {
            "seconds": self.seconds,
            "flops": flops_by_convention(self.model_args, self.parameters, batches),
            "samples": sum(batch.shape[0] for batch in batches),
            "valid_frames": sum(n for batch in batches for n, _, _ in batch.lengths),
            "padded_frames": sum(batch.shape[0] * batch.shape[1] for batch in batches),
            "peak_memory_gib": peak_memory_gib,
            "compiles": compiled_graphs() - self._graphs_after_warm_up,
        }
        ranks = gather_from_ranks(mine)
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        report = self._report(ranks)
        write_atomic(folder / FILE_NAME, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        for line in summary(report):
            logger.info(line)
        return report

    def _report(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        # A step takes as long as its slowest rank.
        seconds = [max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        total = sum(seconds)

        def over_ranks(name: str) -> int:
            return sum(rank[name] for rank in ranks)

        flops = [sum(each) for each in zip(*(rank["flops"] for rank in ranks), strict=True)]
        rows = convention_table(flops, total, len(ranks), self.peak)
        config, encoder = self.job_config, self.job_config.encoder
        audio_seconds = over_ranks("valid_frames") / config.data.frames_per_second
        return {
            "seconds_per_step": spread(seconds),
            "steps": len(seconds),
            "warm_up_steps": self.warm_up_steps,
            "timed_seconds": total,
            "samples_per_second": over_ranks("samples") / total,
            "audio_seconds_per_second": audio_seconds / total,
            "useful_frames_fraction": over_ranks("valid_frames") / over_ranks("padded_frames"),
            "mfu": rows[0]["mfu"],
            "goodput_mfu": rows[1]["mfu"],
            "tflops_per_device": rows[0]["tflops_per_device"],
            "conventions": rows,
            "conventions_note": "recomputation by activation checkpointing is not counted; mfu is over "
            "the dense bf16 peak, null if the device's is not known",
            "attention": self.attention,
            "attention_note": _attention_note(self.attention),
            "peak_tflops": self.peak and self.peak / 1e12,
            "peak_memory_gib": max(rank["peak_memory_gib"] for rank in ranks),
            "compiles_while_timed": max(rank["compiles"] for rank in ranks),
            "gpus": len(ranks),
            "gpus_per_node": gpus_per_node(),
            "parameters": self.parameters,
            "shapes": self._shapes(seconds),
            "text_encoder": _text_encoder_note(encoder.model, encoder.cache_features),
            "step_seconds": seconds,
            "environment": environment(),
            "config": without_secrets(asdict(config)),
        }

    def _shapes(self, seconds: list[float]) -> list[dict[str, Any]]:
        """Each step's micro-batches have one shape, the same on every rank."""
        by_shape: dict[tuple[int, ...], list[float]] = defaultdict(list)
        batches: Counter[tuple[int, ...]] = Counter()
        for step_seconds, step in zip(seconds, self.steps, strict=True):
            by_shape[step[0].shape].append(step_seconds)
            batches[step[0].shape] += len(step)
        return [
            {
                "samples": shape[0],
                "frames": shape[1],
                "text_tokens": shape[2],
                "speaker_frames": shape[3],
                "steps": len(times),
                "micro_batches": batches[shape],
                "seconds_per_step": spread(times),
            }
            for shape, times in sorted(by_shape.items(), key=lambda item: item[0][1])
        ]


def _attention_note(backend: str) -> str:
    if backend not in _NOT_EXECUTED:
        return f"attention {backend}: the padded shapes are what was executed"
    return (
        f"attention {backend}: {_NOT_EXECUTED[backend]} are not computed, so less was executed than the "
        f"padded shapes that mfu counts"
    )


def _text_encoder_note(model: str, cached: bool) -> str:
    if not is_pretrained(model):
        return f"{model}: learned, inside the model, trained"
    if cached:
        return f"{model}: not run; random features stand in for those of [encoder] cache_features"
    return f"{model}: run, frozen, with random weights"


def summary(report: dict[str, Any]) -> list[str]:
    """The report as lines for the log."""
    step = report["seconds_per_step"]
    lines = [
        f"benchmark: {report['steps']} steps, {step['median']:.4f} s per step (p10 {step['p10']:.4f}, "
        f"p90 {step['p90']:.4f}, {step['min']:.4f} to {step['max']:.4f}); "
        f"{report['samples_per_second']:.1f} samples/s, "
        f"{report['audio_seconds_per_second']:.0f} audio-s/s; peak memory "
        f"{report['peak_memory_gib']:.2f} GiB; text encoder {report['text_encoder']}",
        "benchmark: convention           TFLOP/s     MFU  × exact  what it counts",
    ]
    for row in report["conventions"]:
        mfu = "      -" if row["mfu"] is None else f"{row['mfu']:7.1%}"
        lines.append(
            f"benchmark: {row['convention']:<18} {row['tflops_per_device']:9.3f} {mfu} "
            f"{row['times_exact']:8.3f}  {row['counts']}"
        )
    lines.append(f"benchmark: {report['attention_note']}")
    if report["compiles_while_timed"]:
        lines.append(
            f"benchmark: {report['compiles_while_timed']} graphs were compiled while timed; raise "
            f"[benchmark] warmup_steps"
        )
    return lines
