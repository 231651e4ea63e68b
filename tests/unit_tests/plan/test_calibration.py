"""Benchmark runs beside their plans, and factors measured from them."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from tests.helpers.plan_cases import debug_config
from titan_tts.plan import calibration
from titan_tts.plan.calibration import Comparison, compare, factors_file, load_factor, save_factors
from titan_tts.plan.step_time import GUESS, Factor, Interval
from torchtitan.models.dit_tts.errors import InputError

pytestmark = pytest.mark.usefixtures("remembered_passes")


def shape(frames: int, samples: int, steps: int, seconds: float) -> dict:
    lengths = {"frames": frames, "text_tokens": 24, "speaker_frames": 32}
    counts = {"samples": samples, "steps": steps}
    return {**lengths, **counts, "seconds_per_step": {"median": seconds, "max": 99.0}}


def benchmark(*shapes: dict, device: str = "NVIDIA H200", **config: dict) -> dict:
    """What is read of a benchmark.json."""
    place = {"environment": {"device": device}, "gpus": 6, "gpus_per_node": 2}
    found = {"shapes": shapes, "peak_allocated_gib": 40.0}
    return {**place, **found, "config": {**asdict(debug_config(*KEYS)), **config}}


KEYS = ["--training.local_batch_size=4", "--training.global_batch_size=48"]
KEYS += ["--metrics.peak_tflops=500"]


class PlansByFrames:
    """Steps of twice as many seconds as frames, and as many GiB."""

    config, ranks = None, 6

    def __init__(self, *_):
        pass

    def step(self, config, cluster, factor, batches):
        layout = cluster.gpus_per_node, cluster.nodes, cluster.device.peak_flops
        assert (*layout, batches.accumulation) == (2, 3, 500e12, 2)
        assert batches.micro_batch * batches.lengths.frames == 256
        frames = batches.lengths.frames
        memory = SimpleNamespace(total=frames * 2**30)
        return SimpleNamespace(seconds=Interval(frames, 2 * frames, 5 * frames), memory=memory)


def test_shapes_count_as_often_as_they_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "Planner", PlansByFrames)
    report = benchmark(shape(64, 4, 3, 100.0), shape(32, 8, 1, 20.0))
    (tmp_path / "benchmark.json").write_text(json.dumps(report))
    [found] = compare(tmp_path)
    assert compare(tmp_path / "benchmark.json") == [found]
    assert found == Comparison("H200", GUESS.value, 2 * (3 * 64 + 32) / 4, 80.0, 64.0, 40.0)
    assert found.measured_factor == pytest.approx(GUESS.value * 80 / 112)
    assert str(found) == (
        "80000.0 ms per step, 112000.0 by the plan with factor 1.60; 40.0 GiB, 64.0 by the plan"
    )


def test_a_gpu_check_has_several_runs_of_which_some_are_usual(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "Planner", PlansByFrames)
    usual = {"lengths": "longest", "compile": "default", "precision": "bf16"}
    others = ({"lengths": "mixed"}, {"compile": "off"}, {"precision": "fp8"})
    runs = [
        benchmark(shape(64, 4, 3, seconds)) | {"factors": usual | changed}
        for seconds, changed in zip((90.0, 50.0, 60.0, 70.0, 80.0), ({}, *others, {}))
    ]
    (tmp_path / "check.json").write_text(json.dumps({"runs": runs}))
    found = compare(tmp_path / "check.json")
    assert [each.measured_seconds for each in found] == [90.0, 80.0]


@pytest.mark.long
def test_a_real_plan_beside_a_run(tmp_path):
    file = tmp_path / "benchmark.json"
    file.write_text(json.dumps(benchmark(shape(64, 12, 3, 0.01), shape(32, 24, 1, 0.005))))
    [found] = compare(tmp_path)
    assert 0 < found.predicted_seconds < 0.1 and 0 < found.predicted_gib < 2


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("no JSON", "JSONDecodeError"),
        ("5", "not iterable"),
        ("{}", "KeyError"),
        ('{"runs": []}', "none of its runs"),
        (benchmark(shape(64, 4, 1, 1.0), device="cpu"), "the device 'cpu'"),
        (benchmark(shape(64, 4, 1, 1.0), training={"mixed_precision_param": "float32"}), "float32"),
        (benchmark(shape(64, 4, 1, 0.0)), "a factor of 0"),
        (benchmark(shape(64, 4, 0, 1.0)), "a factor of nan"),
    ],
)
def test_files_without_a_measurement_are_refused(report, words, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "Planner", PlansByFrames)
    text = report if isinstance(report, str) else json.dumps(report)
    (tmp_path / "benchmark.json").write_text(text)
    with pytest.raises(InputError, match=f"has no measured steps on a GPU that plans .*{words}"):
        compare(tmp_path)


def test_a_factor_is_that_of_the_plan_times_measured_over_predicted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_factor("H200") == GUESS
    measured = ((2.0, 3.0), (1.6, 2.5), (1.6, 1.0))
    found = save_factors(
        [Comparison("H200", factor, 2.0, each, 9.0, 8.0) for factor, each in measured]
    )
    assert (found["H200"].value, found["H200"].error) == pytest.approx((2.0, 0.6))
    # Those of other GPUs stay.
    save_factors([Comparison("H100", 1.5, 2.0, 2.0, 9.0, 8.0)] * 2)
    assert load_factor("H200") == found["H200"]
    assert load_factor("H100") == Factor(1.5, 0.1, "measured in 2 runs")
    save_factors([Comparison("H100", 1.5, 2.0, 4.0, 9.0, 8.0)])
    assert load_factor("H100").value == 3.0 and load_factor("H200") == found["H200"]
    factors_file().write_text("5")
    with pytest.raises(InputError, match="is corrupt"):
        load_factor("H200")
