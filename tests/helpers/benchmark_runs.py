"""Run folders with invented results, whose true effects are known."""

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

BASE: dict[str, Any] = {"size": "800M", "backend": "torchtitan", "layout": "fsdp"}
BASE |= {"tensor_parallel": 1, "gpus": 8, "nodes": 1, "batch": 8, "accumulation": 1}
BASE |= {"checkpointing": "none", "compile": "off", "precision": "bf16", "attention": "sdpa"}
BASE |= {"optimizer": "AdamW", "lengths": "longest"}


def report(factors: Mapping[str, Any], samples_per_second: float, **changes: Any) -> dict[str, Any]:
    """A benchmark.json. MFU is throughput per GPU / 100; memory grows with the batch."""
    gpus = factors["gpus"]
    seconds = factors["batch"] * factors["accumulation"] * gpus / samples_per_second
    mfu = samples_per_second / gpus / 100
    memory = 10.0 + 2 * factors["batch"]
    parts = {"data": 0.02, "forward": 0.3, "backward": 0.55, "optimizer": 0.1, "other": 0.03}
    rates = {"samples_per_second": samples_per_second, "mfu": mfu, "goodput_mfu": 0.9 * mfu}
    rates |= {"hfu": 1.1 * mfu, "tflops_per_device": 989 * mfu, "peak_tflops": 989.0}
    place = {"gpus": gpus, "gpus_per_node": 8, "environment": {"device": "NVIDIA H200"}}
    return {
        "run_name": "invented",
        "seconds_per_step": {"median": seconds, "p10": seconds, "p90": seconds},
        "audio_seconds_per_second": 20 * samples_per_second,
        **{"peak_allocated_gib": memory, "peak_reserved_gib": memory + 1.5},
        "step_split": {name: part * seconds for name, part in parts.items()},
        **{"loss": 1.25, "compiles_while_timed": 0, "factors": dict(factors)},
        **rates | place | changes,
    }


def write_run(
    folder: Path,
    result: Mapping[str, Any] | None = None,
    *,
    factors: Mapping[str, Any] = BASE,
    state: str = "completed",
    reason: str = "",
    repeat: int = 0,
    forecast: Mapping[str, Any] | None = None,
) -> Path:
    """A run of a grid: run.json, and benchmark.json if there is a result."""
    folder.mkdir(parents=True)
    run = {"name": folder.name, "grid": folder.parent.name, "factors": dict(factors)}
    run |= {"repeat": repeat, "state": state, "reason": reason, "seconds": 60.0}
    run |= {"forecast": forecast}
    (folder / "run.json").write_text(json.dumps(run))
    if result is not None:
        (folder / "benchmark.json").write_text(json.dumps(result))
    return folder


def combinations(**levels: Iterable[Any]) -> list[dict[str, Any]]:
    """BASE with every combination of the levels."""
    return [BASE | dict(zip(levels, values, strict=True)) for values in product(*levels.values())]


def true_speed(factors: Mapping[str, Any]) -> float:
    """Samples/s without noise: it saturates with the batch; compile gives 1.3, but with full
    checkpointing 1.15; full checkpointing takes 0.8."""
    batch, gpus = factors["batch"], factors["gpus"]
    speed = 40 * gpus**0.93 * batch / (batch + 3)
    if factors["compile"] != "off":
        speed *= 1.15 if factors["checkpointing"] == "full" else 1.3
    if factors["checkpointing"] == "full":
        speed *= 0.8
    return speed * (1.6 if factors["precision"] == "fp8" else 1.0)


def write_grid(
    folder: Path, cells: Iterable[dict[str, Any]], repeats: int, noise: float, seed: int = 0
) -> None:
    """`repeats` runs of each cell, whose speed is `true_speed` times exp(normal of `noise`)."""
    random = np.random.default_rng(seed)
    for number, factors in enumerate(cells):
        for repeat in range(repeats):
            speed = true_speed(factors) * float(np.exp(random.normal(0, noise)))
            place, result = folder / f"cell{number:03d}_r{repeat}", report(factors, speed)
            write_run(place, result, factors=factors, repeat=repeat)
