"""Runs in benchmark mode: no data, no weights, no checkpoints, and a report of what was measured."""

import json

import pytest

from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tools.harness import runs

BENCHMARK = [
    "--benchmark.enable",
    "--benchmark.warmup_steps=1",
    "--data.path=/nowhere",
    "--data.num_buckets=2",
    "--data.batch_multiple=4",
    "--training.global_batch_size=4",
    "--metrics.no-enable-tensorboard",
    "--metrics.peak_tflops=0.1",
]


def report_of(run: runs.Run) -> dict:
    assert json.loads((run.folder / "state.json").read_text())["state"] == "completed"
    assert not (run.folder / "checkpoint").exists()
    return json.loads((run.folder / "benchmark.json").read_text())


def test_two_ranks_with_compiled_blocks(tmp_path):
    arguments = [
        *BENCHMARK,
        "--benchmark.steps=6",
        "--parallelism.data_parallel_shard_degree=2",
        "--compile.enable",
        "--compile.backend=aot_eager",
        "--compile.components=model",
    ]
    run = runs.run(tmp_path, "bench", arguments, processes=2)
    report = report_of(run)
    assert (report["gpus"], report["steps"], report["warm_up_steps"]) == (2, 6, 2)
    assert report["compiles_while_timed"] == 0  # every shape was seen in the warm-up
    assert len(report["step_seconds"]) == 6
    samples = 2 * sum(shape["samples"] * shape["steps"] for shape in report["shapes"])
    assert abs(report["samples_per_second"] * report["timed_seconds"] - samples) < 1e-6
    assert report["parameters"] == 3_855_872  # of the full model, of which each rank holds half
    exact = report["conventions"][0]
    assert exact["mfu"] == report["mfu"] == pytest.approx(exact["tflops_per_device"] / 0.1)
    assert report["config"]["benchmark"]["steps"] == 6 and report["environment"]["command"]
    assert report["gpus_per_node"] == 2
    assert report["config"]["job"]["dump_folder"] == str(tmp_path)  # a repeat lands beside this run
    again = runs.start(tmp_path, "bench", [*BENCHMARK, "--benchmark.steps=1"])
    assert again.wait() == 2  # what was measured is not overwritten
    assert "already holds a run's metrics" in again.log.read_text()


def test_a_pretrained_encoder_runs_without_its_weights(tmp_path):
    encoder = write_tiny_t5gemma2(tmp_path / "encoder")
    for file in encoder.iterdir():
        if file.name != "config.json":
            file.unlink()
    arguments = [*BENCHMARK, "--benchmark.duration_seconds=0.5", f"--encoder.model={encoder}"]
    report = report_of(runs.run(tmp_path, "bench", arguments))
    assert report["steps"] >= 1
    assert report["text_encoder"].endswith("run, frozen, with random weights")
