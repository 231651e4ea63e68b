"""Times the trainer's steps and writes what was found, with all that repeats it, to benchmark.json."""

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
from torchtitan.models.dit_tts.benchmark.convention import (
    Convention,
    MicroBatch,
    attention_note,
    conventions,
    table,
)
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.infra.compile import compiled_graphs
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.attention_backends import choose_backend
from torchtitan.models.dit_tts.run_folder import environment, gpus_per_node
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

FILE_NAME = "benchmark.json"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, least and most."""
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {
        "median": float(median),
        "p10": float(p10),
        "p90": float(p90),
        "min": float(min(values)),
        "max": float(max(values)),
    }


class BenchmarkRecorder:
    """Seconds and sizes of each step of one rank; the first `warm_up_steps` are left out.

    Args:
        job_config: the run's, with [benchmark].
        model_args: the model's sizes.
        parameters: trained ones, of the whole model.
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

    def count(
        self,
        shape: tuple[int, int, int, int],
        frames: list[int],
        text_tokens: list[int],
        speaker_frames: list[int],
        text_rows: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Takes note of a micro-batch of the step; arguments as of `TTSMetricsProcessor.count`."""
        lengths = list(zip(frames, text_tokens, speaker_frames, strict=True))
        self._batches.append(MicroBatch(shape, lengths, text_rows))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number` (from 1): its wall time between two moments when the device is idle."""
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
        """Steps that are still to come after `step`: those asked for, or as many as the time that is
        left holds at the median speed; rank 0 decides for all."""
        benchmark = self.job_config.benchmark
        left = self._last_step - step
        if not benchmark.duration_seconds or step <= self.warm_up_steps:
            return left
        time_left = benchmark.duration_seconds - (time.perf_counter() - self._began)
        if self.seconds:
            left = min(left, max(0, int(np.ceil(time_left / np.median(self.seconds)))))
        if dist.is_initialized() and dist.get_world_size() > 1:
            decided = torch.tensor([left], device=utils.device_type)
            dist.broadcast(decided, 0)
            left = int(decided)
        return left

    def finish(self, folder: Path, peak_memory_gib: float) -> dict[str, Any] | None:
        """Gathers all ranks' figures and writes benchmark.json; None on all ranks but 0.

        Args:
            folder: the run's.
            peak_memory_gib: most that this rank's device had reserved.
        """
        counted = conventions(self.model_args, self.parameters, self._all_batches())
        mine = {
            "seconds": self.seconds,
            "flops": [each.flops for each in counted],
            "samples": sum(batch.shape[0] for batch in self._all_batches()),
            "valid_frames": sum(n for batch in self._all_batches() for n, _, _ in batch.lengths),
            "padded_frames": sum(batch.shape[0] * batch.shape[1] for batch in self._all_batches()),
            "peak_memory_gib": peak_memory_gib,
            "compiles": compiled_graphs() - self._graphs_after_warm_up,
        }
        ranks = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
            if dist.get_rank() != 0:
                return None
        report = self._report(counted, ranks, folder)
        write_atomic(folder / FILE_NAME, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        for line in summary(report):
            logger.info(line)
        return report

    def _all_batches(self) -> Iterator[MicroBatch]:
        for batches in self.steps:
            yield from batches

    def _report(
        self, counted: list[Convention], ranks: list[dict[str, Any]], folder: Path
    ) -> dict[str, Any]:
        # A step is as long as its slowest rank's.
        seconds = [max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        total = sum(seconds)

        def over_ranks(name: str) -> int:
            return sum(rank[name] for rank in ranks)

        summed = [
            Convention(each.name, each.counts, sum(rank["flops"][i] for rank in ranks))
            for i, each in enumerate(counted)
        ]
        rows = table(summed, total, len(ranks), self.peak)
        config, encoder = self.job_config, self.job_config.encoder
        return {
            "seconds_per_step": spread(seconds),
            "steps": len(seconds),
            "warm_up_steps": self.warm_up_steps,
            "timed_seconds": total,
            "samples_per_second": over_ranks("samples") / total,
            "audio_seconds_per_second": over_ranks("valid_frames")
            / self.job_config.data.frames_per_second
            / total,
            "useful_frames_share": over_ranks("valid_frames") / over_ranks("padded_frames"),
            "mfu": rows[0]["mfu"],
            "goodput_mfu": rows[1]["mfu"],
            "tflops_per_device": rows[0]["tflops_per_device"],
            "conventions": rows,
            "conventions_note": "recomputation by activation checkpointing is not counted; mfu is over "
            "the dense bf16 peak, null where the device's is not known",
            "attention": self.attention,
            "attention_note": attention_note(self.attention),
            "peak_tflops": self.peak and self.peak / 1e12,
            "peak_memory_gib": max(rank["peak_memory_gib"] for rank in ranks),
            "compiles_while_timed": max(rank["compiles"] for rank in ranks),
            "gpus": len(ranks),
            "gpus_per_node": gpus_per_node(),
            "parameters": self.parameters,
            "shapes": self._shapes(seconds),
            "text_encoder": _text_encoder_said(encoder.model, encoder.cache_features),
            "step_seconds": seconds,
            "environment": environment(),
            "config": asdict(config),
        }

    def _shapes(self, seconds: list[float]) -> list[dict[str, Any]]:
        """Each step's micro-batches are of one shape, the same on every rank."""
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


def _text_encoder_said(model: str, cache: bool) -> str:
    if not is_pretrained(model):
        return f"{model}: learned, inside the model, trained"
    if cache:
        return f"{model}: not run; random features stand in for those of [encoder] cache_features"
    return f"{model}: run, frozen, with random weights"


def summary(report: dict[str, Any]) -> list[str]:
    """The report as lines for the log."""
    step = report["seconds_per_step"]
    lines = [
        f"benchmark: {report['steps']} steps, {step['median']:.4f} s a step (p10 {step['p10']:.4f}, p90 "
        f"{step['p90']:.4f}, {step['min']:.4f} to {step['max']:.4f}); "
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
