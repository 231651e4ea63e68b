"""plan.json of a run that has ended: predicted beside measured; and factors of GPUs from such files."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.config.checks import accumulation_steps
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import JsonLines, write_atomic
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan.devices import Device, cluster_of, device_of
from torchtitan.models.dit_tts.plan.plan import Batches, Planner
from torchtitan.models.dit_tts.plan.step_time import (
    GUESS,
    MEASURED_ERROR,
    Factor,
    rate,
    with_error,
)
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
    """Writes plan.json. Never raises, not even for an interrupt: the run has succeeded.

    Called by one process, when the others have nothing more to exchange with it.

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
            logger.info(f"The run has completed. {FILE_NAME} takes up to half a minute on the CPU")
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
    """Medians over the logged intervals; the first, which compiles, counts only if it is the only one."""
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
    factor = load_factor(None, device.name)
    accumulation = accumulation_steps(config, gpus)
    cluster = cluster_of(device, gpus, gpus_per_node)
    planner = Planner(config, gpus)
    steps = [
        planner.step(
            planner.config, cluster, factor, Batches(shape.lengths, shape.samples, accumulation)
        )
        for shape in shapes
    ]
    times = np.array([shape.times for shape in shapes], float)
    fraction = times / times.sum()
    seconds = with_error(float(fraction @ [step.seconds.middle for step in steps]), factor)
    flops = float(fraction @ [float(step.flops) for step in steps])
    mfu = rate(flops / gpus / device.peak_flops, seconds)
    return {
        "device": device.name,
        "factor": factor.value,
        "factor_origin": factor.origin,
        "seconds_per_step": seconds.middle,
        "seconds_per_step_range": [seconds.low, seconds.high],
        "mfu": mfu.middle,
        "mfu_range": [mfu.low, mfu.high],
        "peak_memory_gib": max(step.memory.total for step in steps) / 2**30,
    }


# Factors


def factors_file() -> Path:
    """The user's file of measured factors."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.path.expanduser(home)) / "titan-tts" / "plan_factors.json"


def load_factor(path: Path | None, device: str) -> Factor:
    """A device's factor from a file; None takes the user's file, and a guess where it has none.

    Raises:
        InputError: a named file without this device, or a file that cannot be read.
    """
    content = _read(path or factors_file()) if path or factors_file().exists() else {}
    if device not in content:
        if path:
            raise InputError(
                f"--factors {path} has no factor of {device}, only of {', '.join(content)}; calibrate it "
                f"with runs on this GPU, or leave --factors out"
            )
        return GUESS
    return content[device]


def calibrate(runs: list[Path], path: Path) -> dict[str, Factor]:
    """Measures factors from ended runs and saves them to `path`, beside those of other GPUs there.

    A run's factor is the one that its plan used, times measured over predicted seconds of a step; a GPU
    has the median of its runs. Communication counts as computation, so take runs on one GPU or in one
    node.

    Args:
        runs: folders of runs, plan.json files, or files with a list of their contents in "plans".

    Raises:
        InputError: a file without a prediction and a measurement.
    """
    values: dict[str, list[float]] = {}
    for run in runs:
        file = run / FILE_NAME if run.is_dir() else run
        try:
            content = json.loads(file.read_text())
            for each in content.get("plans", [content]):
                predicted, measured = each["predicted"], each["measured"]["seconds_per_step"]
                value = predicted["factor"] * measured / predicted["seconds_per_step"]
                if not 0.1 < value < 100:
                    raise ValueError(f"a factor of {value}")
                values.setdefault(predicted["device"], []).append(value)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"--calibrate {file} has no predicted and measured seconds of a step "
                f"({type(error).__name__}: {error}); give the folder of an ended run on a known GPU"
            ) from error
    found = {}
    for device, each in values.items():
        middle = float(np.median(each))
        spread = max(abs(value / middle - 1) for value in each)
        found[device] = Factor(middle, max(MEASURED_ERROR, spread), f"measured in {len(each)} runs")
    kept = _read(path) if path.exists() else {}
    content = {device: asdict(factor) for device, factor in (kept | found).items()}
    write_atomic(path, json.dumps(content, indent=1) + "\n")
    return found


def _read(path: Path) -> dict[str, Factor]:
    try:
        return {device: Factor(**row) for device, row in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} cannot be read as factors ({error}); give a file that --calibrate wrote"
        ) from error
