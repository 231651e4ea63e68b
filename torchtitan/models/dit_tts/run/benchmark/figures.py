"""Figures of benchmark.json from what the ranks have recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import utils

from torchtitan.models.dit_tts.config.job_config import FLOAT8_CONVERTER, JobConfig
from torchtitan.models.dit_tts.infra.parallelize import (
    MIN_BUDGET_WITHOUT_MATMULS,
    blocks_by_checkpointing,
)
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.attention_backends import choose_backend
from torchtitan.models.dit_tts.model.flops import (
    Lengths,
    MicroBatch,
    executed_flops,
    language_model_flops,
    repeated_flops,
    useful_flops,
)

PARTS = ("data", "forward", "backward", "optimizer")
"""Parts of a step in their order; the rest is "other"."""

PADDING = ("padding_fraction", "text_padding_fraction", "reference_padding_fraction")
"""Fractions of latent frames, text tokens and reference frames"""

MFU = ("mfu", "goodput_mfu", "mfu_6n")


def counted_flops(
    args: DiTTTSModelArgs, parameters: int, batches: Sequence[MicroBatch]
) -> list[int]:
    """FLOPs of the micro-batches by each of MFU: of the padded shapes, as PyTorch's counter; of the real lengths
    only; and by the rule for language models, 6·N·T + 12·L·D·T² over padded frames, which takes every parameter
    to work on all of them."""
    by_rule = sum(
        samples * language_model_flops(args, parameters, lengths.frames)
        for batch in batches
        for samples, lengths in _sequences(batch)
    )
    executed = sum(executed_flops(args, batch) for batch in batches)
    useful = sum(useful_flops(args, batch) for batch in batches)
    return [executed, useful, by_rule]


def _sequences(batch: MicroBatch) -> list[tuple[int, Lengths]]:
    """(how many there are, their lengths) of what attends to itself: rows, or a packed batch's samples."""
    if batch.packed_slots:
        return [(1, Lengths(*lengths)) for lengths in batch.lengths]
    samples, *padded = batch.shape
    return [(samples, Lengths(*padded))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, minimum and maximum."""
    low, p10, median, p90, high = np.percentile(values, [0, 10, 50, 90, 100]).tolist()
    return {"median": median, "p10": p10, "p90": p90, "min": low, "max": high}


@dataclass
class Recording:
    """Measurements of one rank: seconds of each timed step, and sums over all of them."""

    seconds: list[float]
    parts: list[dict[str, float]]
    """seconds of each of PARTS, and under "" of the rest"""

    flops: np.ndarray
    """by each of MFU"""

    repeated: float | None
    """FLOPs that activation checkpointing repeats; None where they are not known"""

    samples: int
    valid: np.ndarray
    """(3,) latent frames, text tokens and reference frames; (4,) with captions' tokens"""

    padded: np.ndarray
    """the same with padding"""

    peak_allocated_gib: float
    peak_reserved_gib: float
    compiles: int


def step_split(ranks: Sequence[Recording]) -> dict[str, float]:
    """Medians over the steps of the slowest rank, in seconds."""
    slowest = max(ranks, key=lambda rank: sum(rank.seconds))
    return {
        part or "other": float(np.median([each[part] for each in slowest.parts]))
        for part in (*PARTS, "")
    }


def repeats_are_known(config: JobConfig) -> bool:
    """True if `repeated_flops` counts what activation checkpointing repeats under these settings."""
    options = config.activation_checkpoint
    if options.mode == "memory_budget":
        return options.memory_budget >= MIN_BUDGET_WITHOUT_MATMULS
    by_operation = options.mode == "selective" and options.selective_ac_option == "op"
    by_other_rules = (
        FLOAT8_CONVERTER in config.model.converters or attention_backend(config) == "matmul"
    )
    return not (by_operation and by_other_rules)


def attention_backend(config: JobConfig) -> str:
    """The backend that a run's training uses on this machine."""
    if config.data.batching == "packed":
        return "varlen"
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    return choose_backend(config.attention.backend, torch.device(utils.device_type), dtype)


def repeated_by(config: JobConfig, args: DiTTTSModelArgs, batch: MicroBatch) -> int:
    """FLOPs of a micro-batch's padded shapes, or of its packed samples, that activation checkpointing repeats."""
    blocks = blocks_by_checkpointing(config, args.n_layers)
    return sum(count * repeated_flops(args, each, blocks) for count, each in _sequences(batch))


def summary(report: dict[str, Any]) -> list[str]:
    """The report as lines for the log."""
    step, split = report["seconds_per_step"], report["step_split"]
    mfu = ", ".join(f"{name} {report[name]:.1%}" for name in (*MFU, "hfu") if report[name])
    lines = [
        f"{report['steps']} steps, {step['median']:.4f} s per step (p10 {step['p10']:.4f}, p90 {step['p90']:.4f}, "
        f"{step['min']:.4f} to {step['max']:.4f}); {report['samples_per_second']:.1f} samples/s, "
        f"{report['audio_seconds_per_second']:.0f} seconds of audio per second; peak memory "
        f"{report['peak_allocated_gib']:.2f} GiB allocated, {report['peak_reserved_gib']:.2f} reserved",
        "seconds of a step: "
        + ", ".join(f"{name} {split[name]:.4f}" for name in (*PARTS, "other")),
        f"{report['tflops_per_device']:.3f} TFLOP/s per device; MFU: {mfu or 'not known without a peak'}",
    ]
    if compiles := report["compiles_while_timed"]:
        lines.append(f"{compiles} graphs were compiled while timed; raise [benchmark] warmup_steps")
    return [f"benchmark: {line}" for line in lines]
