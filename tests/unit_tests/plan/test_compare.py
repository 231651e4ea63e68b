"""plan.json after a run, which cannot make it fail, and factors measured from it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.plan_cases import debug_config
from titan_tts.plan import compare
from titan_tts.plan.compare import (
    calibrate,
    factors_file,
    load_factor,
    write_plan,
)
from titan_tts.plan.step_time import GUESS, Factor, Interval
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError

pytestmark = pytest.mark.usefixtures("remembered_passes")


def log_steps(folder: Path, *seconds: float) -> None:
    """Steps 0, 1, ... at times 10, 11, ..."""
    rows = [
        {
            "step": step,
            "time": 10.0 + step,
            "seconds_per_step": each,
            "mfu": 0.3,
            "goodput_mfu": None,
            "samples_per_second": 5.0,
            "peak_allocated_gib": 2.0 + step,
        }
        for step, each in enumerate(seconds)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def no_space(*_):
    raise OSError(28, "No space left on device")


def terminated(*_):
    raise KeyboardInterrupt("terminated by SIGTERM")


@pytest.mark.parametrize(
    "name, replacement, words",
    [("write_atomic", no_space, "No space left"), ("_predicted", terminated, "SIGTERM")],
)
def test_a_completed_run_outlives_its_plan(tmp_path, monkeypatch, caplog, name, replacement, words):
    log_steps(tmp_path, 0.5)
    monkeypatch.setattr(compare, "_predicted", lambda *_: {})
    monkeypatch.setattr(compare, name, replacement)
    write_plan(tmp_path, load_config([]), 1, 1, "NVIDIA H200", {(4, 32, 24, 32): 1}, since=0.0)
    assert words in caplog.text and "plan.json was not written" in caplog.text
    assert not (tmp_path / "plan.json").exists()


class PlansByFrames:
    """Steps of twice as many seconds as frames, and as many GiB."""

    config, ranks = None, 2

    def __init__(self, *_):
        pass

    def step(self, config, cluster, factor, batches):
        frames = batches.lengths.frames
        return SimpleNamespace(
            seconds=Interval(frames, 2 * frames, 5 * frames),
            flops=frames * cluster.device.peak_flops,
            memory=SimpleNamespace(total=frames * 2**30),
        )


def test_shapes_count_as_often_as_they_ran(tmp_path, monkeypatch):
    log_steps(tmp_path, 0.5)
    monkeypatch.setattr(compare, "Planner", PlansByFrames)
    shapes = {(4, 64, 24, 32): 3, (8, 32, 24, 32): 1}
    write_plan(tmp_path, load_config([]), 2, 2, "NVIDIA H200", shapes, since=0.0)
    predicted = json.loads((tmp_path / "plan.json").read_text())["predicted"]
    mean = (3 * 64 + 32) / 4
    assert predicted["seconds_per_step"] == pytest.approx(2 * mean)
    assert predicted["seconds_per_step_range"] == pytest.approx([1.6 * mean, 2.5 * mean])
    # Two GPUs at their peak would take half as many seconds as frames.
    assert predicted["mfu"] == pytest.approx(0.25)
    assert predicted["mfu_range"] == pytest.approx([0.2, 0.3125])
    assert predicted["peak_memory_gib"] == 64


@pytest.mark.long
def test_a_run_keeps_the_plan_beside_what_was_measured(tmp_path):
    log_steps(tmp_path, 99.0, 9.0, 0.5, 0.7)
    shapes = {(12, 64, 40, 64): 3, (24, 32, 40, 64): 1}

    def written(device: str) -> dict:
        write_plan(tmp_path, debug_config(), 1, 1, device, shapes, since=10.5)
        return json.loads((tmp_path / "plan.json").read_text())

    on_cpu = written("cpu")
    measured = on_cpu["measured"]
    assert on_cpu["predicted"] is None and "cpu" in on_cpu["note"]
    assert measured["seconds_per_step"] == pytest.approx(0.6)  # the first compiles
    assert measured["peak_memory_gib"] == 5.0 and measured["goodput_mfu"] is None
    on_gpu = written("NVIDIA H200")
    assert on_gpu["measured"] == measured
    low, high = on_gpu["predicted"]["seconds_per_step_range"]
    assert low < on_gpu["predicted"]["seconds_per_step"] < high
    assert 0 < on_gpu["predicted"]["mfu"] < 1 and on_gpu["predicted"]["peak_memory_gib"] > 0


# Factors


def plan_of(measured: float, factor: float = 1.6, device: str = "H200") -> dict:
    predicted = {"device": device, "factor": factor, "seconds_per_step": 2.0}
    return {"predicted": predicted, "measured": {"seconds_per_step": measured}}


def test_a_factor_is_that_of_the_plan_times_measured_over_predicted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_factor("H200") == GUESS
    runs = []
    for name, plan in zip("abc", (plan_of(3.0, 2.0), plan_of(2.5), plan_of(1.0)), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(json.dumps(plan))
        runs.append(tmp_path / name)
    found = calibrate(runs)["H200"]
    assert (found.value, found.error) == pytest.approx((2.0, 0.6))
    # Those of other GPUs stay, and a file with several plans is one of several runs.
    several = tmp_path / "plans.json"
    several.write_text(json.dumps({"plans": [plan_of(2.0, 1.5, "H100")]}))
    calibrate([several])
    assert load_factor("H200") == found
    assert load_factor("H100") == Factor(1.5, 0.1, "measured in 1 runs")


@pytest.mark.parametrize("content", ["no JSON", "5", json.dumps(plan_of(0.0))])
def test_files_without_a_measurement_are_refused(content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(InputError, match="no predicted and measured"):
        calibrate([tmp_path])
    factors_file().parent.mkdir()
    factors_file().write_text(content)
    with pytest.raises(InputError, match="is corrupt"):
        load_factor("H200")
