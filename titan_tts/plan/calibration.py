"""Measures factors of GPUs by comparing benchmark runs with their plans."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.plan.devices import Cluster, check_device, device_of, with_peak
from titan_tts.plan.planner import Batches, Planner
from titan_tts.plan.step_time import GUESS, MEASURED_ERROR, Factor
from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.config.batch_split import accumulation_steps
from torchtitan.models.dit_tts.config.manager import config_from_dict
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.model.flops import Lengths

_REPORT = "benchmark.json"


@dataclass(frozen=True)
class Comparison:
    """A measured run and the plan's prediction."""

    device: str
    factor: float
    """of the prediction"""

    predicted_seconds: float
    """per step"""

    measured_seconds: float
    predicted_gib: float
    """allocated on the GPU that needs the most"""

    measured_gib: float

    @property
    def measured_factor(self) -> float:
        return self.factor * self.measured_seconds / self.predicted_seconds

    def __str__(self) -> str:
        return (
            f"{self.measured_seconds * 1e3:.1f} ms per step, {self.predicted_seconds * 1e3:.1f} by the "
            f"plan with factor {self.factor:.2f}; {self.measured_gib:.1f} GiB, {self.predicted_gib:.1f} by the plan"
        )


def compare(run: Path) -> list[Comparison]:
    """Compares measured runs with their plans, which takes seconds of a CPU for each. `run`: folder
    of a benchmark run, its benchmark.json, or the file of the GPU check.
    """
    file = run / _REPORT if run.is_dir() else run
    try:
        content = read_json_file(file)
        reports = filter(_is_usual, content["runs"]) if "runs" in content else [content]
        found = [_compare_report(report, str(file)) for report in reports]
        if not found:
            raise ValueError("none of its runs has compiled bf16 steps of full length")
        for each in found:
            if not 0.1 < each.measured_factor < 100:
                raise ValueError(f"a factor of {each.measured_factor}")
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise InputError(
            f"--calibrate {file} has no measured steps on a GPU that plans know ({type(error).__name__}: "
            f"{error}); give the folder of a run with [benchmark] enable = true, or the file of the GPU check"
        ) from error
    return found


def _is_usual(report: dict[str, Any]) -> bool:
    """Of the GPU check's runs, those in the way that training runs: eager ones and fp8 have other factors."""
    of = report["factors"]
    return of["lengths"] == "longest" and of["compile"] != "off" and of["precision"] == "bf16"


def _compare_report(report: dict[str, Any], where: str) -> Comparison:
    """report: of benchmark.json."""
    reported, gpus = report["environment"]["device"], report["gpus"]
    device = device_of(reported)
    if device is None:
        raise ValueError(f"the device {reported!r}")
    config = config_from_dict(report["config"], where)
    check_device(config, device)
    if config.data.batching == "packed":
        raise ValueError("packed batches, whose shape is not a sample's")
    in_node = report["gpus_per_node"]
    cluster = Cluster(with_peak(device, config), in_node, gpus // in_node)
    planner = Planner(config, gpus)
    accumulation = accumulation_steps(config, planner.ranks)
    steps, times, measured = [], [], []
    for shape in report["shapes"]:
        lengths = Lengths(shape["frames"], shape["text_tokens"], shape["speaker_frames"])
        batches = Batches(lengths, shape["samples"], accumulation)
        steps.append(planner.step(planner.config, cluster, GUESS, batches))
        times.append(shape["steps"])
        measured.append(shape["seconds_per_step"]["median"])
    fraction = np.array(times) / sum(times)
    return Comparison(
        device=device.name,
        factor=GUESS.value,
        predicted_seconds=float(fraction @ [step.seconds.estimate for step in steps]),
        measured_seconds=float(fraction @ measured),
        predicted_gib=max(step.memory.total for step in steps) / 2**30,
        measured_gib=report["peak_allocated_gib"],
    )


def save_factors(comparisons: list[Comparison]) -> dict[str, Factor]:
    """Saves the factor of each GPU, the median over its runs, to the user's file, which keeps other GPUs'
    factors. Communication counts as computation, so take runs on one GPU or in one node."""
    values: dict[str, list[float]] = {}
    for each in comparisons:
        values.setdefault(each.device, []).append(each.measured_factor)
    found = {}
    for device, measured in values.items():
        middle = float(np.median(measured))
        spread = max(abs(value / middle - 1) for value in measured)
        origin = f"measured in {len(measured)} runs"
        found[device] = Factor(middle, max(MEASURED_ERROR, spread), origin)
    content = {device: asdict(factor) for device, factor in (_factors() | found).items()}
    write_atomic(factors_file(), json.dumps(content, indent=1) + "\n")
    return found


def factors_file() -> Path:
    """The user's file of measured factors: GPU -> the fields of `Factor`."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.path.expanduser(home)) / "titan-tts" / "plan_factors.json"


def load_factor(device: str) -> Factor:
    """A device's factor from the user's file, or a guess where it has none."""
    return _factors().get(device, GUESS)


def _factors() -> dict[str, Factor]:
    path = factors_file()
    if not path.exists():
        return {}
    try:
        return {device: Factor(**row) for device, row in read_json_file(path).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is corrupt ({error}); delete it and calibrate again") from error
