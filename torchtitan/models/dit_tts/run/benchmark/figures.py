"""Figures of benchmark.json from what the ranks have recorded.

FLOPs are counted by several conventions, so that no MFU is reported without the one it was computed by.
"""

from collections.abc import Iterable, Mapping, Sequence
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
    speaker_keys,
    useful_flops,
)

PARTS = ("data", "forward", "backward", "optimizer")
"""Parts of a step in their order; the rest is "other"."""

PADDING = ("padding_fraction", "text_padding_fraction", "reference_padding_fraction")
"""Fractions of latent frames, text tokens and reference frames"""

# T, Lt and Ls are a sample's latent frames, text tokens and speaker keys (reference frames after
# patching), N the trained parameters, L the decoder's blocks, D its width.
CONVENTIONS = {
    "exact": "padded shapes, as PyTorch's counter",
    "exact goodput": "real lengths only",
    "6N T": "6·N·T + 12·L·D·T² over all parameters, padded shapes",
    "6N (T+Lt+Ls)": "6·N·S + 12·L·D·S² over all parameters with S = T + Lt + Ls, padded shapes",
}
"""Convention -> what it counts. `mfu` uses the first, `goodput_mfu` the second. The 6N rules come from
language models: they take every parameter to work on all positions, whereas here the speaker
encoder and the projections of text and speaker work on other, fewer positions, and AdaLN once per
sample. "exact" and "exact goodput" include a pretrained text encoder that runs."""


def flops_by_convention(
    args: DiTTTSModelArgs, parameters: int, batches: Sequence[MicroBatch]
) -> list[int]:
    """Total FLOPs of the micro-batches by each of CONVENTIONS."""
    frames_only = all_keys = 0
    for samples, lengths in (each for batch in batches for each in _sequences(batch)):
        keys = lengths.frames + lengths.text_tokens + speaker_keys(args, lengths)
        frames_only += samples * language_model_flops(args, parameters, lengths.frames)
        all_keys += samples * language_model_flops(args, parameters, keys)
    executed = sum(executed_flops(args, batch) for batch in batches)
    useful = sum(useful_flops(args, batch) for batch in batches)
    return [executed, useful, frames_only, all_keys]


def _sequences(batch: MicroBatch) -> list[tuple[int, Lengths]]:
    """(how many there are, their lengths) of what attends to itself: rows, or a packed batch's samples."""
    if batch.packed_slots:
        return [(1, Lengths(*lengths)) for lengths in batch.lengths]
    samples, *padded = batch.shape
    return [(samples, Lengths(*padded))]


def convention_table(
    flops: Sequence[float], seconds: float, devices: int, peak: float | None
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
    low, p10, median, p90, high = np.percentile(values, [0, 10, 50, 90, 100]).tolist()
    return {"median": median, "p10": p10, "p90": p90, "min": low, "max": high}


@dataclass
class Recording:
    """What one rank has recorded; lists have an entry for each timed step."""

    seconds: list[float]
    parts: list[dict[str, float]]
    """seconds of each of PARTS, and under "" of the rest"""

    flops: list[list[int]]
    """by each of CONVENTIONS"""

    repeated: list[int] | None
    """FLOPs that activation checkpointing repeats; None where they are not known"""

    samples: list[int]
    valid: list[np.ndarray]
    """(3,) latent frames, text tokens and reference frames"""

    padded: list[np.ndarray]
    """(3,) the same with padding"""

    peak_allocated_gib: float
    peak_reserved_gib: float
    compiles: int


@dataclass
class Totals:
    """Of each timed step over all ranks, as arrays (steps,)."""

    seconds: np.ndarray
    """of the slowest rank"""

    flops: np.ndarray
    """(conventions, steps)"""

    hardware: np.ndarray | None
    """FLOPs with those that activation checkpointing repeats"""

    samples: np.ndarray
    audio_seconds: np.ndarray
    padding: dict[str, float]
    """each of PADDING, over all steps"""


def totals(ranks: Sequence[Recording], copies: int, frames_per_second: float) -> Totals:
    """Sums over ranks. `copies`: ranks that hold the same samples, which count once."""

    def over_ranks(lists: Iterable[Any]) -> np.ndarray:
        return np.sum([np.array(each, float) for each in lists], axis=0) / copies

    flops = over_ranks(rank.flops for rank in ranks).T
    known = all(rank.repeated is not None for rank in ranks)
    valid = over_ranks(rank.valid for rank in ranks)
    padded = over_ranks(rank.padded for rank in ranks)
    return Totals(
        seconds=np.max([rank.seconds for rank in ranks], axis=0),
        flops=flops,
        hardware=flops[0] + over_ranks(rank.repeated for rank in ranks) if known else None,
        samples=over_ranks(rank.samples for rank in ranks),
        audio_seconds=valid[:, 0] / frames_per_second,
        padding=dict(zip(PADDING, (1 - valid.sum(0) / padded.sum(0)).tolist(), strict=True)),
    )


def step_split(ranks: Sequence[Recording]) -> dict[str, float]:
    """Medians over the steps of the slowest rank, in seconds."""
    slowest = max(ranks, key=lambda rank: sum(rank.seconds))
    return {
        part or "other": float(np.median([each[part] for each in slowest.parts]))
        for part in (*PARTS, "")
    }


def weighted(
    steps: Totals,
    frames: Sequence[int],
    often: Mapping[int, float],
    devices: int,
    peak: float | None,
) -> dict[str, float | None] | None:
    """Rates over the steps of an epoch: each shape's median step time, as often as the shape comes.

    Args:
        frames: padded, of each step.
        often: padded frames of a bucket -> its global batches in an epoch.

    Returns:
        None where a bucket was not timed.
    """
    shapes = [shape for shape, batches in often.items() if batches > 0]
    if not set(shapes) <= set(frames):
        return None
    chosen = [np.flatnonzero(np.equal(frames, shape)) for shape in shapes]
    fractions = np.array([often[shape] for shape in shapes]) / sum(often.values())
    seconds = float(fractions @ [np.median(steps.seconds[rows]) for rows in chosen])

    def mean(values: np.ndarray) -> float:
        """Over the steps of an epoch."""
        return float(fractions @ [values[rows].mean() for rows in chosen])

    def fraction_of_peak(flops: np.ndarray | None) -> float | None:
        if flops is None or peak is None:
            return None
        return mean(flops) / seconds / devices / peak

    return {
        "seconds_per_step": seconds,
        "samples_per_second": mean(steps.samples) / seconds,
        "audio_seconds_per_second": mean(steps.audio_seconds) / seconds,
        "mfu": fraction_of_peak(steps.flops[0]),
        "goodput_mfu": fraction_of_peak(steps.flops[1]),
        "hfu": fraction_of_peak(steps.hardware),
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
        flex = config.attention.backend == "flex" and utils.device_type == "cuda"
        return "flex" if flex else "varlen"
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    return choose_backend(config.attention.backend, torch.device(utils.device_type), dtype)


def repeated_by(config: JobConfig, args: DiTTTSModelArgs, batch: MicroBatch) -> int:
    """FLOPs of a micro-batch's padded shapes, or of its packed samples, that activation checkpointing repeats."""
    blocks = blocks_by_checkpointing(config, args.n_layers)
    return sum(count * repeated_flops(args, each, blocks) for count, each in _sequences(batch))


def summary(report: dict[str, Any]) -> list[str]:
    """The report as lines for the log."""
    step, split = report["seconds_per_step"], report["step_split"]
    hfu = "-" if report["hfu"] is None else f"{report['hfu']:.1%}"
    lines = [
        f"{report['steps']} steps, {step['median']:.4f} s per step (p10 {step['p10']:.4f}, p90 {step['p90']:.4f}, "
        f"{step['min']:.4f} to {step['max']:.4f}); {report['samples_per_second']:.1f} samples/s, "
        f"{report['audio_seconds_per_second']:.0f} seconds of audio per second; peak memory "
        f"{report['peak_allocated_gib']:.2f} GiB allocated, {report['peak_reserved_gib']:.2f} reserved",
        "seconds of a step: "
        + ", ".join(f"{name} {split[name]:.4f}" for name in (*PARTS, "other")),
        "convention           TFLOP/s     MFU  × exact  what it counts",
    ]
    for row in report["conventions"]:
        mfu = "      -" if row["mfu"] is None else f"{row['mfu']:7.1%}"
        lines.append(
            f"{row['convention']:<18} {row['tflops_per_device']:9.3f} {mfu} {row['times_exact']:8.3f}  {row['counts']}"
        )
    lines.append(f"hfu {hfu}")
    if compiles := report["compiles_while_timed"]:
        lines.append(f"{compiles} graphs were compiled while timed; raise [benchmark] warmup_steps")
    return [f"benchmark: {line}" for line in lines]
