"""Every kind of run is read; one that cannot be read is listed and disturbs no other."""

import json
import math
import os

import pytest

from tests.helpers.benchmark_runs import BASE, report, write_run
from titan_tts.grids.runs import find_runs
from torchtitan.models.dit_tts.errors import InputError


def only(folder):
    (run,) = find_runs([str(folder)])
    return run


def test_a_run_of_a_grid(tmp_path):
    factors = BASE | {"optimizer.betas": [0.9, 0.1]}
    forecast = {"gpu": "H200", "fits": True, "gib": 45.1, "seconds_per_step": 0.41, "mfu": "x"}
    result = report(BASE, 100.0, hfu=None)
    folder = tmp_path / "grid" / "a"
    write_run(folder, result, factors=factors | {"batch": 4}, repeat=2, forecast=forecast)
    write_run(tmp_path / "grid" / "trials" / "b", report(BASE, 5.0))  # a search's, no benchmark
    run = only(tmp_path)
    assert (run.name, run.grid, run.repeat) == ("a", "grid", 2)
    assert (run.folder, run.state) == (str(folder), "completed")
    assert run.measured
    assert run.factors == factors | {"device": "NVIDIA H200", "optimizer.betas": "[0.9, 0.1]"}
    assert (run.figures["seconds_per_step"], run.figures["samples_per_second"]) == (0.64, 100)
    assert (run.figures["mfu"], run.figures["forward_seconds"]) == (0.125, 0.3 * 0.64)
    assert "hfu" not in run.figures
    assert run.predicted == {"fits": True, "gib": 45.1, "seconds_per_step": 0.41}


def test_runs_of_other_work_are_no_repeats(tmp_path):
    """Equal in every factor, but with other lengths: the length becomes a factor."""
    for name, frames in (("a", 32), ("b", 256), ("c", 256)):
        config = {"data": {"max_frames": frames, "num_workers": 2, "bucket_frames": [frames]}}
        write_run(tmp_path / "grid" / name, report(BASE, 100.0, config=config))
    runs = find_runs([str(tmp_path)])
    assert [run.factors["data.max_frames"] for run in runs] == [32, 256, 256]
    assert [run.factors["data.bucket_frames"] for run in runs] == ["[32]", "[256]", "[256]"]
    assert all("data.num_workers" not in run.factors for run in runs)


TIMED = "its state says running, but all steps were timed"
AUTO = {"state": "completed", "factors": BASE | {"batch": "auto"}}
# File, its content, whether there is a benchmark.json -> state, reason, whether statistics may use it
STATES = [
    ("run", {"state": "oom", "reason": "why"}, False, ("oom", "why", False)),
    ("run", {"state": "failed", "reason": "\x1b[31m red\nline"}, False, ("failed", r"\x1b[31m red line", False)),
    ("run", AUTO, False, ("completed", "it has no figures", False)),
    ("run", {"state": "oom"}, True, ("oom", "", False)),
    ("state", {"state": "running", "step": 3}, True, ("completed", TIMED, True)),
    ("state", {"state": "oom", "error": "no memory"}, True, ("oom", "no memory", False)),
    ("nothing", {}, True, ("completed", "", True)),
]  # fmt: skip


@pytest.mark.parametrize("file, content, measured, expected", STATES)
def test_states(tmp_path, file, content, measured, expected):
    (tmp_path / f"{file}.json").write_text(json.dumps(content))
    if measured:  # also where no peak is known
        (tmp_path / "benchmark.json").write_text(json.dumps(report(BASE, 100.0, mfu=None)))
    run = only(tmp_path)
    assert (run.state, run.reason, run.measured) == expected
    # A batch that was searched and not found is none.
    assert run.factors.get("batch") == (8 if measured else None) and bool(run.figures) == measured


def test_each_run_is_found_once_and_checkpoints_are_not_searched(tmp_path):
    a = write_run(tmp_path / "grids" / "one" / "a", report(BASE, 100.0))
    write_run(tmp_path / "checkpoint" / "b")
    write_run(a / "inside")
    write_run(tmp_path / "grids" / "checkpointing_full")
    (tmp_path / "training").mkdir()
    for name in ("state.json", "metrics.jsonl"):  # no benchmark
        (tmp_path / "training" / name).write_text("{}")
    paths = [str(tmp_path), str(a), str(tmp_path / "grids")]
    assert {run.name for run in find_runs(paths)} == {"a", "checkpointing_full"}


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_no_run_is_an_error_in_a_sentence(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=rf"RUNS = .*{name}(,| is) .*give run folders$"):
        find_runs([str(tmp_path / name)])


def changed(**changes):
    return json.dumps(report(BASE, 100.0) | changes)


UNREADABLE = [
    ("benchmark", changed(samples_per_second=math.nan), "samples_per_second = nan, but it must be"),
    ("benchmark", changed(hfu=math.inf), "hfu = inf, but it must be finite"),
    ("benchmark", changed(factors={"gpus": "x"}), "gpus = 'x', but it must be a whole number"),
    ("benchmark", changed(factors={"batch": 0}), "batch = 0, but it must be a whole number"),
    ("benchmark", "[1, 2]", "benchmark.json is no JSON object"),
    ("benchmark", changed()[:200], "benchmark.json is no JSON object"),
    ("benchmark", changed(seconds_per_step={}), "median"),
    ("run", "{", "run.json is no JSON object"),
    ("state", "", "state.json is no JSON object"),
]


@pytest.mark.parametrize("file, content, reason", UNREADABLE)
def test_an_unreadable_run_disturbs_no_other(tmp_path, file, content, reason):
    write_run(tmp_path / "good", report(BASE, 100.0))
    (write_run(tmp_path / "bad", report(BASE, 9.0)) / f"{file}.json").write_text(content)
    bad, good = find_runs([str(tmp_path)])
    assert (bad.name, bad.state, good.state) == ("bad", "unreadable", "completed")
    assert reason in bad.reason and len(bad.reason) < 500 and "\n" not in bad.reason
    assert not bad.figures and not bad.measured and good.measured


def test_a_folder_that_cannot_be_read_is_an_error_in_a_sentence(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(InputError, match=f"{tmp_path} cannot be read .Permission denied"):
        find_runs([str(tmp_path)])
