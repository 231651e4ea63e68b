"""plan.json after a run, which cannot make it fail, and factors measured from it."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.plan_cases import debug_config
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan import compare
from torchtitan.models.dit_tts.plan.compare import (
    RanShape,
    calibrate,
    factors_file,
    load_factor,
    write_plan,
)
from torchtitan.models.dit_tts.plan.step_time import GUESS, Interval

pytestmark = pytest.mark.usefixtures("remembered_passes")

ROW = {
    "step": 1,
    "time": 11.0,
    "seconds_per_step": 0.5,
    "mfu": None,
    "goodput_mfu": None,
    "samples_per_second": 5.0,
    "peak_allocated_gib": 2.0,
}


def no_space(*_):
    raise OSError(28, "No space left on device")


def terminated(*_):
    raise KeyboardInterrupt("terminated by SIGTERM")


def written(folder) -> None:
    shapes = [RanShape(4, Lengths(32, 24, 32), 1)]
    write_plan(folder, load_config([]), 1, 1, "NVIDIA H200", shapes, since=0.0)


@pytest.mark.parametrize(
    "name, replacement, words",
    [
        ("write_atomic", no_space, "No space left"),
        ("_predicted", terminated, "terminated by SIGTERM"),
    ],
)
def test_a_completed_run_outlives_its_plan(tmp_path, monkeypatch, caplog, name, replacement, words):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.setattr(compare, "_predicted", lambda *_: {})
    monkeypatch.setattr(compare, name, replacement)
    with caplog.at_level(logging.INFO):
        written(tmp_path)
    *_, before, said = caplog.messages
    assert "up to half a minute" in before
    assert words in said and "plan.json was not written" in said
    assert not (tmp_path / "plan.json").exists()


class PlansByFrames:
    """Steps of twice as many seconds as frames, and as many GiB."""

    config = None

    def __init__(self, *_):
        pass

    def step(self, config, cluster, factor, batches):
        frames = batches.lengths.frames
        return SimpleNamespace(
            seconds=Interval(frames, 2 * frames, 5 * frames),
            flops=frames * 989e12,
            memory=SimpleNamespace(total=frames * 2**30),
        )


def test_shapes_count_as_often_as_they_ran(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.setattr(compare, "Planner", PlansByFrames)
    shapes = [RanShape(4, Lengths(64, 24, 32), 3), RanShape(8, Lengths(32, 24, 32), 1)]
    write_plan(tmp_path, load_config([]), 2, 2, "NVIDIA H200", shapes, since=0.0)
    predicted = json.loads((tmp_path / "plan.json").read_text())["predicted"]
    mean = (3 * 64 + 32) / 4
    assert predicted["seconds_per_step"] == pytest.approx(2 * mean)
    assert predicted["seconds_per_step_range"] == pytest.approx([1.6 * mean, 2.5 * mean])
    # Two GPUs of 989 TFLOP/s at their peak would take half as many seconds as frames.
    assert predicted["mfu"] == pytest.approx(0.25)
    assert predicted["mfu_range"] == pytest.approx([0.2, 0.3125])
    assert predicted["peak_memory_gib"] == 64


def test_a_corrupt_line_of_metrics_is_logged(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text("{not json}\n")
    written(tmp_path)
    assert "plan.json was not written: JSONDecodeError" in caplog.text


@pytest.mark.long
def test_a_run_keeps_the_plan_beside_what_was_measured(tmp_path):
    config = debug_config()
    rows = [
        {
            "step": step,
            "time": 10.0 + step,
            "seconds_per_step": seconds,
            "mfu": 0.3,
            "goodput_mfu": None,
            "samples_per_second": 5.0,
            "peak_allocated_gib": 2.0 + step,
        }
        for step, seconds in ((0, 99.0), (1, 9.0), (2, 0.5), (3, 0.7))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shapes = [RanShape(12, Lengths(64, 40, 64), 3), RanShape(24, Lengths(32, 40, 64), 1)]

    def written(device: str) -> dict:
        write_plan(tmp_path, config, 1, 1, device, shapes, since=10.5)
        return json.loads((tmp_path / "plan.json").read_text())

    on_cpu = written("cpu")
    assert on_cpu["predicted"] is None and "cpu" in on_cpu["note"]
    assert on_cpu["measured"]["seconds_per_step"] == pytest.approx(0.6)  # the first compiles
    assert (
        on_cpu["measured"]["peak_memory_gib"] == 5.0 and on_cpu["measured"]["goodput_mfu"] is None
    )
    on_gpu = written("NVIDIA H200")
    assert on_gpu["measured"] == on_cpu["measured"]
    low, high = on_gpu["predicted"]["seconds_per_step_range"]
    assert low < on_gpu["predicted"]["seconds_per_step"] < high
    assert 0 < on_gpu["predicted"]["mfu"] < 1 and on_gpu["predicted"]["peak_memory_gib"] > 0


# Factors


def plan_of(folder: Path, measured: float, factor: float = 1.6, device: str = "H200") -> Path:
    folder.mkdir()
    predicted = {"device": device, "factor": factor, "seconds_per_step": 2.0}
    content = {"predicted": predicted, "measured": {"seconds_per_step": measured}}
    (folder / "plan.json").write_text(json.dumps(content))
    return folder


def test_a_factor_is_that_of_the_plan_times_measured_over_predicted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    assert load_factor(None, "H200") == GUESS
    runs = [
        plan_of(tmp_path / "a", 3.0, 2.0),
        plan_of(tmp_path / "b", 2.5),
        plan_of(tmp_path / "c", 1.0),
    ]
    found = calibrate(runs, factors_file())["H200"]
    assert found.value == pytest.approx(2.0) and found.error == pytest.approx(0.6)
    [b] = calibrate([runs[1] / "plan.json"], tmp_path / "other.json").values()
    assert b.error == 0.1
    # Those of other GPUs stay, and a file with several plans is one of several runs.
    several = {
        "plans": [json.loads((plan_of(tmp_path / "d", 2.0, 1.5, "H100") / "plan.json").read_text())]
    }
    (tmp_path / "plans.json").write_text(json.dumps(several))
    assert calibrate([tmp_path / "plans.json"], factors_file())["H100"].value == 1.5
    assert load_factor(None, "H200") == found and load_factor(None, "H100").value == 1.5
    with pytest.raises(InputError, match="no factor of A100"):
        load_factor(factors_file(), "A100")


@pytest.mark.parametrize(
    "content",
    ["no JSON", "5", '{"predicted": null, "measured": {"seconds_per_step": 1.0}}', "zero"],
)
def test_runs_without_a_measurement_are_refused(content, tmp_path):
    folder = plan_of(tmp_path / "run", 0.0)
    if content != "zero":
        (folder / "plan.json").write_text(content)
    factors = tmp_path / "factors.json"
    with pytest.raises(InputError, match="no predicted and measured"):
        calibrate([folder], factors)
    assert not factors.exists()
    factors.write_text(content)
    with pytest.raises(InputError, match="cannot be read as factors"):
        load_factor(factors, "H200")
