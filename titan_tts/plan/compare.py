"""plan.json of a run that has ended: predicted beside measured; and factors of GPUs from such files."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torchtitan.tools.logging import logger

from titan_tts.plan.devices import Cluster, device_of, with_peak
from titan_tts.plan.plan import Planner
from titan_tts.plan.predictions import Batches
from titan_tts.plan.step_time import (
    GUESS,
    MEASURED_ERROR,
    Factor,
    rate,
    with_error,
)
from torchtitan.models.dit_tts.config.batch_split import accumulation_steps
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import JsonLines, write_atomic
from torchtitan.models.dit_tts.model.flops import Lengths

FILE_NAME = "plan.json"


def write_plan(
    folder: Path,
    config: JobConfig,
    gpus: int,
    gpus_per_node: int,
    reported_device: str,
    shapes: Mapping[tuple[int, int, int, int], int],
    since: float,
) -> None:
    """Writes plan.json. Never raises, not even for an interrupt: the run has succeeded.

    Called by one process, when the others have nothing more to exchange with it.

    Args:
        folder: the run's.
        config: as the run resolved it.
        reported_device: as the driver names it.
        shapes: micro-batches that this rank ran, by (samples, frames, text tokens, speaker frames).
        since: time of the start of this life of the run; what was logged before is left out.
    """
    try:
        measured = _measured(JsonLines(folder / "metrics.jsonl").read(), since)
        device = device_of(reported_device)
        predicted, note = None, ""
        if device is None:
            note = f"no plan is made for {reported_device!r}"
        elif measured is None or not shapes:
            note = "nothing was logged"
        else:
            logger.info(f"The run has completed. {FILE_NAME} takes up to half a minute on the CPU")
            cluster = Cluster(with_peak(device, config), gpus_per_node, gpus // gpus_per_node)
            try:
                predicted = _predicted(config, cluster, shapes)
            except Exception as error:
                note = f"the prediction failed: {type(error).__name__}: {error}"
        content = {"predicted": predicted, "measured": measured, "note": note}
        write_atomic(folder / FILE_NAME, json.dumps(content, indent=1) + "\n")
    except (Exception, KeyboardInterrupt) as error:
        logger.warning(
            f"The run has completed, but its {FILE_NAME} was not written: "
            f"{type(error).__name__}: {error}"
        )


def _measured(rows: list[dict[str, Any]], since: float) -> dict[str, Any] | None:
    """Medians over the logged intervals; the first, which compiles, counts only if it is the only one."""
    rows = [row for row in rows if row["time"] >= since]
    if not rows:
        return None
    steady = rows[1:] or rows
    medians = {}
    for name in ("seconds_per_step", "mfu", "goodput_mfu", "samples_per_second"):
        values = [row[name] for row in steady if row[name] is not None]
        medians[name] = float(np.median(values)) if values else None
    # What is predicted is allocated; what the allocator reserves is more.
    return medians | {"peak_memory_gib": max(row["peak_allocated_gib"] for row in rows)}


def _predicted(
    config: JobConfig, cluster: Cluster, shapes: Mapping[tuple[int, int, int, int], int]
) -> dict[str, Any]:
    factor = load_factor(cluster.device.name)
    planner = Planner(config, cluster.gpus)
    accumulation = accumulation_steps(config, planner.ranks)
    steps = []
    for samples, *lengths in shapes:
        batches = Batches(Lengths(*lengths), samples, accumulation)
        steps.append(planner.step(planner.config, cluster, factor, batches))
    times = np.array(list(shapes.values()), float)
    fraction = times / times.sum()
    seconds = with_error(float(fraction @ [step.seconds.middle for step in steps]), factor)
    flops = float(fraction @ [float(step.flops) for step in steps])
    mfu = rate(flops / cluster.gpus / cluster.device.peak_flops, seconds)
    return {
        "device": cluster.device.name,
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
    """The user's file of measured factors: GPU -> the fields of `Factor`."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.path.expanduser(home)) / "titan-tts" / "plan_factors.json"


def load_factor(device: str) -> Factor:
    """A device's factor from the user's file, or a guess where it has none.

    Raises:
        InputError: the file is corrupt.
    """
    return _factors().get(device, GUESS)


def calibrate(runs: list[Path]) -> dict[str, Factor]:
    """Measures factors from ended runs and saves them to the user's file, beside those of other GPUs.

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
    known = _factors()
    content = {device: asdict(factor) for device, factor in (known | found).items()}
    write_atomic(factors_file(), json.dumps(content, indent=1) + "\n")
    return found


def _factors() -> dict[str, Factor]:
    path = factors_file()
    if not path.exists():
        return {}
    try:
        return {device: Factor(**row) for device, row in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is corrupt ({error}); delete it and calibrate again") from error
