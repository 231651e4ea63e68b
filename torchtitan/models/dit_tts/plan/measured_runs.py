"""Measured runs as `--calibrate` is given them, checked key by key.

The file holds one measured run, a list of them, or {"runs": [...]}. A run is what benchmark mode writes
(benchmark.json); of it these keys are read:

    config          the resolved config, section by section
    gpus            number of ranks
    environment     {"device": name as the driver reports it}; or "gpu": a name of `--gpu`
    gpus_per_node   optional; all in one node up to 8, else 8
    peak_memory_gib optional; compared with the prediction, fits nothing
    shapes          list of {samples, frames, text_tokens, speaker_frames, steps, micro_batches,
                    seconds_per_step}: padded sizes of a micro-batch, how many steps and micro-batches
                    had them, and seconds of a step, a number or {"median": ...}
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import config_from_dict
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan.devices import Device, device_of, find_device, with_peak


@dataclass(frozen=True)
class MeasuredShape:
    samples: int
    lengths: Lengths
    accumulation: int
    seconds: float
    """of a step"""


@dataclass(frozen=True)
class MeasuredRun:
    what: str
    """file and number, for messages"""

    config: JobConfig
    device: Device
    gpus: int
    gpus_per_node: int
    peak_memory_gib: float | None
    shapes: list[MeasuredShape]


def read_runs(path: Path) -> list[MeasuredRun]:
    """Raises InputError at the first value that no measured run can have."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"--calibrate {path} cannot be read ({error}); give a benchmark.json, or a list of them"
        ) from error
    if isinstance(content, dict):
        content = content.get("runs", [content])
    found = content if isinstance(content, list) else []
    runs = [run for run in found if isinstance(run, dict) and run.get("shapes")]
    if not runs:
        raise InputError(
            f"--calibrate {path} holds no run with shapes; give a benchmark.json, or a list of them"
        )
    return [_run(run, f"{path}, run {number}") for number, run in enumerate(runs, 1)]


def _run(run: dict[str, Any], what: str) -> MeasuredRun:
    config = config_from_dict(_of(run, "config", dict, what), what)
    if config.model.flavor not in model_flavors():
        raise InputError(
            f"{what}: [model] flavor = {config.model.flavor!r} is not known; give a run's benchmark.json of "
            f"one of {', '.join(model_flavors())}"
        )
    gpus = _count(run, "gpus", what)
    in_node = _count(run, "gpus_per_node", what) if run.get("gpus_per_node") else min(gpus, 8)
    peak = run.get("peak_memory_gib") or None
    return MeasuredRun(
        what=what,
        config=config,
        device=with_peak(_device(run, what), config),
        gpus=gpus,
        gpus_per_node=in_node,
        peak_memory_gib=None if peak is None else _positive(peak, "peak_memory_gib", what),
        shapes=[
            _shape(shape, f"{what}, shape {number}")
            for number, shape in enumerate(_of(run, "shapes", list, what), 1)
        ],
    )


def _shape(shape: Any, what: str) -> MeasuredShape:
    if not isinstance(shape, dict):
        raise InputError(f"{what} is {shape!r}; it must be an object, as benchmark mode writes it")
    seconds = shape.get("seconds_per_step")
    if isinstance(seconds, dict):
        seconds = seconds.get("median")
    steps, micro_batches = (_count(shape, name, what) for name in ("steps", "micro_batches"))
    if micro_batches < steps:
        raise InputError(
            f"{what}: micro_batches = {micro_batches} with steps = {steps}; a step has at least one "
            f"micro-batch: give a run's benchmark.json"
        )
    frames = _count(shape, "frames", what)
    # Without texts or references these are 0.
    text, speaker = (_count(shape, name, what, 0) for name in ("text_tokens", "speaker_frames"))
    return MeasuredShape(
        samples=_count(shape, "samples", what),
        lengths=Lengths(frames, text, speaker),
        accumulation=round(micro_batches / steps),
        seconds=_positive(seconds, "seconds_per_step", what),
    )


def _of(content: dict[str, Any], key: str, kind: type, what: str) -> Any:
    if not isinstance(content.get(key), kind):
        words = {dict: "an object", list: "a list", str: "a name"}[kind]
        raise InputError(
            f"{what}: {key} = {content.get(key)!r} must be {words}; give a run's benchmark.json"
        )
    return content[key]


def _count(content: dict[str, Any], key: str, what: str, least: int = 1) -> int:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(
            f"{what}: {key} = {value!r} must be a whole number, at least {least}; give a run's "
            f"benchmark.json"
        )
    return value


def _positive(value: Any, key: str, what: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise InputError(
            f"{what}: {key} = {value!r} must be a finite number greater than 0; give a run's "
            f"benchmark.json"
        )
    return float(value)


def _device(run: dict[str, Any], what: str) -> Device:
    if "gpu" in run:
        return find_device(_of(run, "gpu", str, what))
    reported = _of(_of(run, "environment", dict, what), "device", str, what)
    device = device_of(reported)
    if device is None:
        raise InputError(
            f"{what} was measured on {reported!r}, a device that plans do not know; leave it out"
        )
    return device
