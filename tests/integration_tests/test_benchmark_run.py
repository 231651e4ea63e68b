"""Runs in benchmark mode: no data, no weights, no checkpoints, and a report of what was measured."""

import json

import pytest

from tools.harness import runs

BENCHMARK = ["--benchmark.enable", "--benchmark.warmup_steps=1", "--data.path=/nowhere"]
BENCHMARK += ["--data.num_buckets=2", "--data.batch_multiple=4", "--training.global_batch_size=4"]
BENCHMARK += ["--metrics.no-enable-tensorboard", "--metrics.peak_tflops=0.1"]

PARTS = {"data", "forward", "backward", "optimizer", "other"}


def test_two_ranks(tmp_path):
    arguments = [*BENCHMARK, "--benchmark.steps=6", "--metrics.log_freq=1"]
    arguments += ["--activation_checkpoint.mode=full", "--parallelism.data_parallel_shard_degree=2"]
    run = runs.run(tmp_path, "bench", arguments, processes=2)
    assert json.loads((run.folder / "state.json").read_text())["state"] == "completed"
    assert not (run.folder / "checkpoint").exists()
    report = json.loads((run.folder / "benchmark.json").read_text())
    assert (report["gpus"], report["steps"], report["warm_up_steps"]) == (2, 6, 2)
    assert max(run.metrics()) == 2 + 6
    assert report["loss"] == run.metrics()[2 + 6]["loss"]
    split = report["step_split"]
    assert split.keys() == PARTS and min(split.values()) > 0
    assert max(split.values()) < report["seconds_per_step"]["max"]
    assert len(report["step_seconds"]) == 6
    assert report["parameters"] == 3_855_872  # of the full model, of which each rank holds half
    assert report["mfu"] == pytest.approx(report["tflops_per_device"] / 0.1)
    assert report["config"]["benchmark"]["steps"] == 6 and report["environment"]["command"]
    assert report["gpus_per_node"] == 2
    assert report["run_name"] == "bench" and report["factors"]["layout"] == "fsdp"
    assert 1.2 * report["mfu"] < report["hfu"] < 4 / 3 * report["mfu"]  # of all blocks
    assert report["config"]["job"]["dump_folder"] == str(tmp_path)  # a repeat lands beside this run
    again = runs.start(tmp_path, "bench", [*BENCHMARK, "--benchmark.steps=1"])
    assert again.wait() == 2  # what was measured is not overwritten
    assert "already holds a run's metrics" in again.log.read_text()


def test_fp8_by_its_key(tmp_path):
    arguments = [*BENCHMARK, "--benchmark.steps=1", "--model.converters=float8"]
    run = runs.run(tmp_path, "bench", [*arguments, "--quantize.linear.float8.emulate"])
    assert "fp8, recipe tensorwise, emulated: 24 matmuls of the blocks" in run.log.read_text()
