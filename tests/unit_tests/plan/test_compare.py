"""What follows the end of a run cannot make it fail."""

import json
import logging
from types import SimpleNamespace

import pytest

from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan import compare as compare
from torchtitan.models.dit_tts.plan.compare import RanShape, write_plan
from torchtitan.models.dit_tts.plan.step_time import Interval

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


class ForecastsByFrames:
    """Steps of twice as many seconds as frames, and as many GiB."""

    def __init__(self, *_, **__):
        pass

    def step(self, config, layout, lengths, samples, accumulation):
        frames = lengths.frames
        return SimpleNamespace(
            seconds=Interval(frames, 2 * frames, 5 * frames),
            flops=SimpleNamespace(total=frames * 989e12),
            memory=SimpleNamespace(total=frames * 2**30),
        )


def test_shapes_count_as_often_as_they_ran(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.setattr(compare, "Forecaster", ForecastsByFrames)
    shapes = [RanShape(4, Lengths(64, 24, 32), 3), RanShape(8, Lengths(32, 24, 32), 1)]
    write_plan(tmp_path, load_config([]), 2, 2, "NVIDIA H200", shapes, since=0.0)
    predicted = json.loads((tmp_path / "plan.json").read_text())["predicted"]
    mean = (3 * 64 + 32) / 4
    assert predicted["seconds_per_step"] == pytest.approx(2 * mean)
    assert predicted["seconds_per_step_range"] == pytest.approx([mean, 5 * mean])
    # Two GPUs of 989 TFLOP/s at their peak would take half as many seconds as frames.
    assert predicted["mfu"] == pytest.approx(0.25)
    assert predicted["mfu_range"] == pytest.approx([0.1, 0.5])
    assert predicted["peak_memory_gib"] == 64


def test_a_damaged_line_of_metrics_is_said(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text("{not json}\n")
    written(tmp_path)
    assert "plan.json was not written: JSONDecodeError" in caplog.text
