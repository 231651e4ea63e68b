"""Every kind of run is read, and what cannot be read is listed and disturbs no other."""

import json
import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import tomli_w
from torch.utils.tensorboard import SummaryWriter

from tests.helpers.benchmark_runs import BASE, report, write_run
from tests.helpers.hostile_files import fifo, link
from titan_tts.grids.runs import find_runs, read_run
from torchtitan.models.dit_tts.config.manager import load_config, without_none
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.run.factors import FACTORS


def only(folder):
    (run,) = find_runs([str(folder)])
    return run


def states(folder):
    return {run.name: run.state for run in find_runs([str(folder)])}


# Sources


def test_a_run_of_a_grid(tmp_path):
    factors = BASE | {"optimizer.lr": 0.1}
    folder = write_run(tmp_path / "grid" / "a", report(BASE, 100.0), factors=factors, repeat=2)
    run = only(tmp_path)
    assert (run.name, run.grid, run.repeat, run.source) == ("a", "grid", 2, "benchmark")
    assert (run.folder, run.state, run.reason) == (str(folder), "completed", "")
    assert run.measured and run.factors == factors | {"device": "NVIDIA H200"}
    assert run.figures["seconds_per_step"] == 0.64 and run.figures["forward_seconds"] == 0.3 * 0.64
    assert run.mfu_convention == "exact"


def test_runs_of_other_work_are_no_repeats(tmp_path):
    """Equal in every factor, but with other lengths: the length becomes a factor."""
    for name, frames in (("a", 32), ("b", 256), ("c", 256)):
        config = {"data": {"max_frames": frames, "num_workers": 2, "bucket_frames": [frames]}}
        write_run(tmp_path / "grid" / name, report(BASE, 100.0, config=config))
    runs = find_runs([str(tmp_path)])
    assert [run.factors["data.max_frames"] for run in runs] == [32, 256, 256]
    assert [run.factors["data.bucket_frames"] for run in runs] == ["[32]", "[256]", "[256]"]
    assert all("data.num_workers" not in run.factors for run in runs)


def test_trials_of_a_search_are_no_benchmarks(tmp_path):
    write_run(tmp_path / "grid" / "a", report(BASE, 100.0))
    write_run(tmp_path / "grid" / "trials" / "b", report(BASE, 5.0))
    assert only(tmp_path).figures["samples_per_second"] == 100.0


def test_weighted_figures_are_preferred_where_they_are_known(tmp_path):
    weighted = {"seconds_per_step": 0.9, "samples_per_second": 70.0, "mfu": None}
    write_run(tmp_path / "a", report(BASE, 100.0, weighted=weighted))
    found = only(tmp_path).figures
    assert (found["seconds_per_step"], found["samples_per_second"]) == (0.9, 70.0)
    assert found["mfu"] == 0.125


def test_figures_that_are_null_or_not_there_are_not_known(tmp_path):
    result = report(BASE, 100.0, mfu=None, goodput_mfu=None, hfu=None, peak_tflops=None)
    del result["loss"], result["step_split"]
    write_run(tmp_path / "cpu", result)
    run = only(tmp_path)
    assert run.measured and not {"mfu", "goodput_mfu", "hfu", "loss", "data_seconds"} & set(
        run.figures
    )


def test_factors_of_a_report_without_them_come_from_its_config(tmp_path):
    config = asdict(load_config(["--job.config_file", "train_configs/debug.toml"]))
    result = report(BASE, 100.0, config=config, gpus=1, gpus_per_node=1)
    del result["factors"]
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "benchmark.json").write_text(json.dumps(result, default=str))
    assert only(tmp_path).factors["size"] == "debug" and only(tmp_path).measured


def metrics_lines(seconds):
    for step, each in enumerate(seconds):
        row = {
            "step": step,
            "seconds_per_step": each,
            "samples_per_second": 12 / each,
            "mfu": None,
            "peak_memory_gib": 2.0 + step,
            "peak_allocated_gib": 1.0,
            "loss": 3.0 - step,
        }
        yield json.dumps(row)


def test_an_ordinary_training_run(tmp_path):
    """Medians after the first row, which compiles; the most memory, the last loss."""
    config = load_config(["--job.config_file", "train_configs/debug.toml"])
    (tmp_path / "metrics.jsonl").write_text("\n".join(metrics_lines([9, 1, 2, 4])) + "\n{torn")
    (tmp_path / "config.toml").write_text(tomli_w.dumps(without_none(asdict(config))))
    (tmp_path / "env.json").write_text('{"world_size": 4, "gpus_per_node": 2, "device": "cpu"}')
    (tmp_path / "state.json").write_text('{"state": "preempted", "step": 3}')
    run = only(tmp_path)
    assert (run.source, run.state) == ("metrics", "preempted") and run.measured
    assert run.figures == {
        "seconds_per_step": 2,
        "samples_per_second": 6,
        "peak_reserved_gib": 5,
        "peak_allocated_gib": 1,
        "loss": 0,
    }
    assert set(run.factors) == {*FACTORS, "device"}
    found = {name: run.factors[name] for name in ("gpus", "nodes", "batch", "device")}
    assert found == {"gpus": 4, "nodes": 2, "batch": 3, "device": "cpu"}


def test_without_its_config_a_training_run_is_listed_but_not_compared(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("\n".join(metrics_lines([9, 1])) + "\n")
    run = only(tmp_path)
    assert run.figures["seconds_per_step"] == 1 and not run.measured
    assert run.reason.startswith("its factors are not known: FileNotFoundError")


def write_events(folder, tags):
    writer = SummaryWriter(str(folder))
    for step in range(4):
        for tag, value in tags.items():
            writer.add_scalar(tag, value * (10 if step == 0 else 1), step)
    writer.close()


def test_upstreams_tensorboard_files(tmp_path):
    tags = {
        "throughput(tps)": 5000.0,
        "mfu(%)": 40.0,
        "tflops": 395.0,
        "memory/max_reserved(GiB)": 60.0,
        "memory/max_active(GiB)": 50.0,
        "time_metrics/end_to_end(s)": 0.5,
        "loss_metrics/global_avg_loss": 2.0,
        "grad_norm": 1.0,
    }
    write_events(tmp_path / "llama" / "20260101-0000", tags)
    run = only(tmp_path)
    assert (run.name, run.source, run.state) == ("llama/20260101-0000", "tensorboard", "unknown")
    assert run.mfu_convention == "upstream" and not run.measured
    assert run.figures == pytest.approx(
        {
            "tokens_per_second_per_device": 5000,
            "mfu": 0.4,
            "tflops_per_device": 395,
            "peak_reserved_gib": 600,  # the maximum, here of the first step
            "peak_allocated_gib": 500,
            "seconds_per_step": 0.5,
            "loss": 2,
        }
    )


def test_our_own_tensorboard_files(tmp_path):
    tags = {
        "speed/samples_per_second": 12.0,
        "speed/mfu": 0.25,
        "validation/loss": 3.0,
        "loss": 2.0,
    }
    write_events(tmp_path / "run" / "tb", tags)
    (tmp_path / "run" / "state.json").write_text('{"state": "completed", "step": 4}')
    run = only(tmp_path)
    assert (run.name, run.state, run.mfu_convention) == ("run", "completed", "exact")
    assert run.figures == {"samples_per_second": 12, "mfu": 0.25, "loss": 2}


@pytest.mark.parametrize("content", [b"", b"no records" * 99])
def test_event_files_without_a_figure_are_unreadable(tmp_path, content):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "events.out.tfevents.1.host").write_bytes(content)
    run = only(tmp_path)
    assert run.state == "unreadable" and run.reason.startswith("it has no figures")


# States


def test_states_without_figures(tmp_path):
    for state in ("oom", "failed", "timeout", "skipped", "waiting"):
        write_run(tmp_path / state, state=state, reason=f"why {state}")
    found = {run.name: (run.state, run.reason, run.measured) for run in find_runs([str(tmp_path)])}
    assert found == {name: (name, f"why {name}", False) for name in found} and len(found) == 5


def test_a_completed_run_whose_figures_are_gone_says_so(tmp_path):
    write_run(tmp_path / "a")
    assert (only(tmp_path).state, only(tmp_path).reason) == ("completed", "it has no figures")


def test_figures_of_a_run_that_failed_are_shown_but_not_compared(tmp_path):
    write_run(tmp_path / "a", report(BASE, 100.0), state="oom")
    assert only(tmp_path).figures and not only(tmp_path).measured


def test_a_complete_benchmark_whose_process_died_later_is_complete(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "benchmark.json").write_text(json.dumps(report(BASE, 100.0)))
    assert (only(tmp_path).state, only(tmp_path).name) == ("completed", "invented")
    (folder / "state.json").write_text('{"state": "running", "step": 3}')
    run = only(tmp_path)
    assert run.state == "completed" and "its state says running" in run.reason
    (folder / "state.json").write_text('{"state": "oom", "step": 3, "error": "no memory"}')
    assert (only(tmp_path).state, only(tmp_path).reason) == ("oom", "no memory")


def test_a_factor_that_both_files_name_is_that_of_the_benchmark(tmp_path):
    write_run(tmp_path / "a", report(BASE, 100.0), factors=BASE | {"batch": 4})
    run = only(tmp_path)
    assert run.factors["batch"] == 8
    assert run.reason == "batch is 4 in run.json, 8 in benchmark.json"


def test_predictions(tmp_path):
    forecast = {"gpu": "H200", "fits": True, "gib": 45.1, "seconds_per_step": 0.41, "mfu": None}
    write_run(tmp_path / "a", report(BASE, 100.0), forecast=forecast)
    write_run(tmp_path / "b", report(BASE, 100.0))
    first, second = (run.predicted for run in find_runs([str(tmp_path)]))
    assert first == {"fits": True, "gib": 45.1, "seconds_per_step": 0.41}
    assert second == {}


# Finding


def test_each_run_is_found_once_and_checkpoints_are_not_searched(tmp_path):
    a = write_run(tmp_path / "grids" / "one" / "a", report(BASE, 100.0))
    write_run(tmp_path / "checkpoint" / "b")
    write_run(a / "inside")
    write_run(tmp_path / "grids" / "checkpointing_full")
    paths = [str(tmp_path), str(a), str(tmp_path / "grids")]
    assert {run.name for run in find_runs(paths)} == {"a", "checkpointing_full"}


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_no_run_is_an_error_in_a_sentence(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InputError, match=rf"RUNS = .*{name}, but no \w+ is .*give folders of runs$"
    ):
        find_runs([str(tmp_path / name)])


# Hostile files


def changed(**changes):
    return json.dumps(report(BASE, 100.0) | changes)


def without(name):
    content = report(BASE, 100.0)
    del content[name]
    return json.dumps(content)


HOSTILE = {
    "nan": (changed(samples_per_second=math.nan), "samples_per_second = nan, but it must be a"),
    "infinite": (changed(hfu=math.inf), "hfu = inf, but it must be a finite number of at least 0"),
    "text": (changed(mfu="a lot"), "mfu = 'a lot', but it must be a finite number"),
    "truth": (changed(mfu=True), "mfu = True, but it must be"),
    "negative": (changed(samples_per_second=-3), "samples_per_second = -3, but it must be"),
    "zero": (changed(samples_per_second=0), "it must be a finite number above 0"),
    "huge": (changed(peak_tflops=10**400), "peak_tflops = 1"),
    "weighted": (changed(weighted={"mfu": "x"}), "mfu = 'x'"),
    "split": (changed(step_split={"data": math.nan}), "data_seconds = nan"),
    "factor": (changed(factors=BASE | {"gpus": 0}), "gpus = 0, but it must be a positive integer"),
    "no factor": (changed(factors={"size": "800M"}), "benchmark.json: factors has no backend"),
    "column": (changed(factors=BASE | {"mfu": 1}), "a factor is named 'mfu', as a column is"),
    "list": ("[1, 2]", "benchmark.json holds no JSON object"),
    "deep": ("[" * 100_000, "benchmark.json is nested too deep"),
    "deep object": ('{"a":' * 100_000, "benchmark.json is nested too deep"),
    "no bytes": ("", "benchmark.json is empty"),
    "half": (changed()[:200], "benchmark.json is no JSON"),
    "latin": (b'{"a": "\xff"}', "benchmark.json is no JSON"),
    "no speed": (without("samples_per_second"), "benchmark.json has no samples_per_second"),
    "no median": (changed(seconds_per_step={}), "median"),
    "pipe": (fifo, "benchmark.json is no file"),
    "loop": (link("benchmark.json"), "benchmark.json is no file"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_benchmark_is_unreadable_and_the_others_are_not(tmp_path, kind):
    content, reason = HOSTILE[kind]
    write_run(tmp_path / "good", report(BASE, 100.0))
    path = write_run(tmp_path / "bad", factors={}) / "benchmark.json"
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    bad, good = find_runs([str(tmp_path)])
    assert (bad.state, good.state) == ("unreadable", "completed")
    assert reason in bad.reason and len(bad.reason) < 500 and "\n" not in bad.reason
    assert not bad.figures and not bad.measured and good.measured


@pytest.mark.parametrize("name", ["run.json", "state.json", "env.json"])
def test_other_hostile_files(tmp_path, name):
    folder = write_run(tmp_path / "a", report(BASE, 100.0))
    (folder / name).write_text("{")
    run = only(tmp_path)
    assert run.state == "unreadable" and run.reason.startswith(f"{name} is no JSON")


def test_what_a_terminal_or_a_file_cannot_hold_is_escaped(tmp_path):
    folder = write_run(tmp_path / "a", state="failed", reason="\x1b[31m\x00 \ud800 red\nline")
    run = read_run(str(folder), str(tmp_path))
    assert run.reason == r"\x1b[31m\x00 \ud800 red line"


def test_files_and_folders_without_rights():
    """Root reads everything, so another user looks."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        top = Path(name)
        top.chmod(0o755)
        write_run(top / "good", report(BASE, 100.0))
        (write_run(top / "file", report(BASE, 100.0)) / "benchmark.json").chmod(0)
        write_run(top / "folder", report(BASE, 100.0)).chmod(0)
        was_root = os.geteuid() == 0
        if was_root:
            os.seteuid(65534)
        try:
            found = {run.name: (run.state, run.reason) for run in find_runs([name])}
        finally:
            if was_root:
                os.seteuid(0)
            (top / "folder").chmod(0o755)
    assert found == {
        "good": ("completed", ""),
        "file": ("unreadable", "benchmark.json: Permission denied"),
        "folder": ("unreadable", "folder: Permission denied"),
    }
