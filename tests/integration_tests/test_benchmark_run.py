"""Runs in benchmark mode: no data, no weights, no checkpoints, and a report of what was measured."""

import json
from dataclasses import replace

import pytest

from tools.harness import runs
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths, forward_flops

BENCHMARK = ["--benchmark.enable", "--benchmark.warmup_steps=1", "--data.path=/nowhere"]
BENCHMARK += ["--data.num_buckets=2", "--data.batch_multiple=4", "--training.global_batch_size=4"]
BENCHMARK += ["--metrics.no-enable-tensorboard", "--metrics.peak_tflops=0.1"]

PARTS = {"data", "forward", "backward", "optimizer", "other"}


def blocks_flops(args: DiTTTSModelArgs, shape: dict) -> int:
    """FLOPs of the forward pass through all blocks of decoder and encoders."""
    lengths = Lengths(shape["frames"], shape["text_tokens"], shape["speaker_frames"])
    none = replace(args, n_layers=0, speaker_n_layers=0, text_n_layers=0)
    return forward_flops(args, lengths) - forward_flops(none, lengths)


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
    samples = 2 * sum(shape["samples"] * shape["steps"] for shape in report["shapes"])
    assert abs(report["samples_per_second"] * report["timed_seconds"] - samples) < 1e-6
    assert report["parameters"] == 3_855_872  # of the full model, of which each rank holds half
    exact = report["conventions"][0]
    assert exact["mfu"] == report["mfu"] == pytest.approx(exact["tflops_per_device"] / 0.1)
    assert report["config"]["benchmark"]["steps"] == 6 and report["environment"]["command"]
    assert report["gpus_per_node"] == 2
    assert report["run_name"] == "bench" and report["factors"]["layout"] == "fsdp"
    learned = {"text_vocab_size": 1, "text_n_layers": report["config"]["encoder"]["n_layers"]}
    args = replace(model_flavors()["debug"], **learned)
    repeated = sum(
        # A block's forward pass again, of every block, for each micro-batch of both ranks.
        2 * shape["micro_batches"] * shape["samples"] * blocks_flops(args, shape)
        for shape in report["shapes"]
    )
    rate = repeated / report["timed_seconds"] / 2
    assert report["hfu"] - report["mfu"] == pytest.approx(rate / 0.1e12)
    assert report["config"]["job"]["dump_folder"] == str(tmp_path)  # a repeat lands beside this run
    again = runs.start(tmp_path, "bench", [*BENCHMARK, "--benchmark.steps=1"])
    assert again.wait() == 2  # what was measured is not overwritten
    assert "already holds a run's metrics" in again.log.read_text()


def test_fp8_by_its_key(tmp_path):
    arguments = [*BENCHMARK, "--benchmark.steps=1", "--model.converters=float8"]
    run = runs.run(tmp_path, "bench", [*arguments, "--quantize.linear.float8.emulate"])
    assert "fp8, recipe tensorwise, emulated: 24 matmuls of the blocks" in run.log.read_text()
