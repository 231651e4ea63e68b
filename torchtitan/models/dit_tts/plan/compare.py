"""plan.json of a run that has ended: what the plan predicts beside what was measured."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.config.checks import accumulation_steps
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.files import JsonLines, write_atomic
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan.constants import Constants, load
from torchtitan.models.dit_tts.plan.devices import Device, cluster_of, device_of
from torchtitan.models.dit_tts.plan.forecast import Forecaster, layout_of
from torchtitan.tools.logging import logger

FILE_NAME = "plan.json"


@dataclass(frozen=True)
class RanShape:
    """A padded micro-batch of one rank, and how often it ran."""

    samples: int
    lengths: Lengths
    times: int


def ran_shapes(counts: Mapping[tuple[int, int, int, int], int]) -> list[RanShape]:
    """From (samples, frames, text tokens, speaker frames) -> micro-batches, as the metrics count."""
    return [RanShape(shape[0], Lengths(*shape[1:]), times) for shape, times in counts.items()]


def write_plan(
    folder: Path,
    config: JobConfig,
    gpus: int,
    gpus_per_node: int,
    reported_device: str,
    shapes: list[RanShape],
    since: float,
) -> None:
    """Never raises, not even for an interrupt: the run has succeeded. For one process, when the others
    have nothing more to exchange with it.

    Args:
        folder: the run's.
        config: as the run resolved it.
        reported_device: as the driver names it.
        shapes: that this rank ran.
        since: time of the start of this life of the run; what was logged before is left out.
    """
    try:
        measured = _measured(JsonLines(folder / "metrics.jsonl").read(), since)
        device = device_of(reported_device)
        predicted: dict[str, Any] | None = None
        if device is None:
            why = f"no plan is made for {reported_device!r}"
        elif measured is None or not shapes:
            why = "nothing was logged"
        else:
            logger.info(
                f"The run has completed. What was to be expected of it is predicted for {FILE_NAME}, up "
                f"to half a minute on the CPU"
            )
            predicted, why = _predicted_or_why(config, device, gpus, gpus_per_node, shapes)
        content = {"predicted": predicted, "measured": measured, "note": why}
        write_atomic(folder / FILE_NAME, json.dumps(content, indent=1) + "\n")
    except (Exception, KeyboardInterrupt) as error:
        logger.warning(
            f"The run has completed, but its {FILE_NAME} was not written: "
            f"{type(error).__name__}: {error}"
        )


def _predicted_or_why(
    config: JobConfig, device: Device, gpus: int, gpus_per_node: int, shapes: list[RanShape]
) -> tuple[dict[str, Any] | None, str]:
    """(the prediction, if it could be made; a note on it)."""
    began = time.perf_counter()
    try:
        predicted = _predicted(config, device, gpus, gpus_per_node, shapes)
    except Exception as error:
        return None, f"the prediction failed: {type(error).__name__}: {error}"
    return predicted, f"predicted in {time.perf_counter() - began:.1f} s after the run"


def _measured(rows: list[dict[str, Any]], since: float) -> dict[str, Any] | None:
    """Medians over the logged intervals; the first, which compiles, counts only where it is all."""
    rows = [row for row in rows if row["time"] >= since]
    if not rows:
        return None
    steady = rows[1:] or rows

    def median(name: str) -> float | None:
        values = [row[name] for row in steady if row[name] is not None]
        return float(np.median(values)) if values else None

    return {
        "seconds_per_step": median("seconds_per_step"),
        "mfu": median("mfu"),
        "goodput_mfu": median("goodput_mfu"),
        "samples_per_second": median("samples_per_second"),
        # What is predicted is allocated; what the allocator reserves is more.
        "peak_memory_gib": max(row["peak_allocated_gib"] for row in rows),
    }


def _predicted(
    config: JobConfig, device: Device, gpus: int, gpus_per_node: int, shapes: list[RanShape]
) -> dict[str, Any]:
    constants: Constants = load(None, device.name)
    layout = layout_of(config, gpus)
    cluster = cluster_of(device, gpus, gpus_per_node)
    forecaster = Forecaster(config, cluster, constants, shorter=True)
    accumulation = accumulation_steps(config, gpus)
    config = upstream_view(config, run_folder_path(config), gpus)
    times = np.array([shape.times for shape in shapes], float)
    steps = [
        forecaster.step(config, layout, shape.lengths, shape.samples, accumulation)
        for shape in shapes
    ]
    share = times / times.sum()
    seconds = {
        name: float(share @ [getattr(step.seconds, name) for step in steps])
        for name in ("low", "middle", "high")
    }
    flops = float(share @ [float(step.flops.total) for step in steps])
    at_peak = flops / gpus / device.peak_flops
    most = max(step.memory.total for step in steps)
    return {
        "seconds_per_step": seconds["middle"],
        "seconds_per_step_range": [seconds["low"], seconds["high"]],
        "mfu": at_peak / seconds["middle"],
        "mfu_range": [at_peak / seconds["high"], at_peak / seconds["low"]],
        "peak_memory_gib": most / 2**30,
        "constants": constants.origin,
    }
