"""Benchmark mode: what is timed, how it is counted, and what the report says of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.benchmark_mode import config, loader_of
from tests.helpers.clock import Clock
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.manager import config_from_dict
from torchtitan.models.dit_tts.infra import device_time
from torchtitan.models.dit_tts.model.flops import (
    Lengths,
    MicroBatch,
    repeated_flops,
    training_flops,
)
from torchtitan.models.dit_tts.run.benchmark import recorder as recorder_module
from torchtitan.models.dit_tts.run.benchmark.figures import counted_flops, repeated_by, summary
from torchtitan.models.dit_tts.run.benchmark.recorder import BenchmarkRecorder

ARGS = model_flavors()["debug"]


def flops(*lengths: tuple[int, int, int]) -> int:
    return sum(training_flops(ARGS, Lengths(*each)) for each in lengths)


def by_rule(parameters: int, *frames: int) -> int:
    """6·N·T + 12·L·D·T²."""
    return sum(6 * parameters * n + 12 * ARGS.n_layers * ARGS.dim * n**2 for n in frames)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(device_time, "time", made)
    return made


def recorder(tmp_path, *arguments: str, peak: float | None = None) -> BenchmarkRecorder:
    job = config(tmp_path, *arguments)
    loader_of(job)  # sets the number of steps
    args = replace(ARGS, attention=job.attention.backend)
    return BenchmarkRecorder(job, args, 1000, peak, lambda: (1.0, 1.5))


MICRO_BATCH = MicroBatch((2, 64, 24, 32), [(64, 24, 32), (50, 20, 30)])


def run_steps(made: BenchmarkRecorder, clock: Clock, durations: list[float]) -> int:
    """All steps; each duration in turn, the last repeated."""
    number = 0
    for number in range(1, made.job_config.training.steps + 1):
        with made.step(number):
            made.count(MICRO_BATCH)
            # An eighth each, the backward pass in two micro-batches, and an eighth that is not marked.
            for part in ("data", "forward", "backward", "forward", "backward", "optimizer", "", ""):
                clock.now += durations[min(number, len(durations)) - 1] / 8
                if part:
                    made.mark(part)
        made.loss = 1.0 / number
    return number


def test_warm_up_is_left_out_and_a_run_can_be_repeated(tmp_path, clock, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    made = recorder(tmp_path, "--job.experiment=bm", peak=1e12)
    assert run_steps(made, clock, [50.0] * 6 + [1.0, 2.0, 3.0, 2.0, 2.0]) == 11
    report = made.finish(tmp_path)
    step = report["seconds_per_step"]
    assert (step["median"], step["min"], step["max"]) == pytest.approx((2.0, 1.0, 3.0))
    padding = [report[f"{stream}padding_fraction"] for stream in ("", "text_", "reference_")]
    assert padding == pytest.approx([14 / 128, 4 / 48, 2 / 64])
    assert json.loads((tmp_path / "benchmark.json").read_text()) == json.loads(json.dumps(report))
    assert report["loss"] == 1 / 11
    assert report["run_name"] == "bm" and report["factors"]["lengths"] == "mixed"
    assert report["attention"] == "matmul"
    assert (report["warm_up_steps"], report["steps"], report["parameters"]) == (6, 5, 1000)
    assert report["peak_tflops"] == 1.0
    assert config_from_dict(report["config"], "bm") == made.job_config
    variables = report["environment"]["variables"]
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert not {"PATH", "HOME"} & variables.keys() and "a-secret" not in json.dumps(report)


def test_ranks_are_summed_and_the_slowest_counts(tmp_path, clock, monkeypatch):
    """This rank, and one that is slower at first, with half the samples."""
    made = recorder(tmp_path, "--benchmark.steps=4", peak=1e12)
    assert run_steps(made, clock, [50.0] * 6 + [1.0, 2.0, 3.0, 10.0]) == 10
    gathered = []

    def gather(mine):
        half = {
            name: np.array(getattr(mine, name)) // 2
            for name in ("flops", "repeated", "samples", "valid", "padded")
        }
        memory = {"peak_allocated_gib": 8.0, "peak_reserved_gib": 9.0}
        slower = {"seconds": [5.0, 1.0, 1.0, 1.0], "compiles": 3}
        gathered[:] = [mine, replace(mine, **half, **memory, **slower)]
        return gathered

    monkeypatch.setattr(recorder_module, "gather_from_ranks", gather)
    report = made.finish(tmp_path)
    assert report["step_seconds"] == [5.0, 2.0, 3.0, 10.0]
    step = report["seconds_per_step"]
    # Between the ordered values at 10, 50 and 90 % of the way: 2 3 5 10.
    assert [step[name] for name in ("min", "p10", "median", "p90", "max")] == pytest.approx(
        [2.0, 2.3, 4.0, 8.5, 10.0]
    )
    assert report["timed_seconds"] == 20.0 and report["gpus"] == 2
    assert report["samples_per_second"] == pytest.approx((8 + 4) / 20)
    assert report["audio_seconds_per_second"] == pytest.approx((4 * 114 + 2 * 114) / 25 / 20)
    long, short = flops((64, 24, 32)), flops((50, 20, 30))
    assert report["mfu"] == pytest.approx((4 + 2) * 2 * long / 20 / 2 / 1e12)
    assert report["goodput_mfu"] == pytest.approx((4 + 2) * (long + short) / 20 / 2 / 1e12)
    assert report["mfu_6n"] == pytest.approx((4 + 2) * 2 * by_rule(1000, 64) / 20 / 2 / 1e12)
    for name in ("", "goodput_"):
        assert report[f"{name}tflops_per_device"] == pytest.approx(report[f"{name}mfu"])
    assert (report["peak_allocated_gib"], report["peak_reserved_gib"]) == (8.0, 9.0)
    assert report["compiles_while_timed"] == 3
    assert summary(report)[-1].startswith("benchmark: 3 graphs were compiled while timed")
    # The slowest is this rank, 16 s over all: medians of eighths of 1, 2, 3 and 10 s.
    eighths = {"data": 1, "forward": 2, "backward": 2, "optimizer": 1, "other": 2}
    expected = {part: count * 2.5 / 8 for part, count in eighths.items()}
    assert report["step_split"] == pytest.approx(expected)
    # The overhead of one rank alone is not known.
    one_unknown = made._report([gathered[0], replace(gathered[1], repeated=None)])
    assert one_unknown["hfu"] is None and one_unknown["mfu"] == report["mfu"]
    # Two ranks of tensor parallelism have the same samples: half the work on as many devices.
    made.job_config.parallelism.tensor_parallel_degree = 2
    halved = made._report(gathered)
    for name in ("samples_per_second", "audio_seconds_per_second", "mfu", "hfu"):
        assert halved[name] == pytest.approx(report[name] / 2), name
    assert halved["reference_padding_fraction"] == report["reference_padding_fraction"]


def test_on_a_gpu_parts_are_between_events(tmp_path, clock, monkeypatch):
    """Where the host runs ahead, which it must not be kept from: its own time says nothing of them."""
    device = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = device.now

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    made = recorder(tmp_path)
    monkeypatch.setattr(recorder_module.utils, "device_type", "cuda")
    module = SimpleNamespace(Event=Event)  # without synchronize
    monkeypatch.setattr(recorder_module.utils, "device_module", module)
    parts = {"data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 3.0, "": 0.25}
    for number in (made.warm_up_steps, made.warm_up_steps + 1):
        with made.step(number):
            for part, seconds in parts.items():
                device.now += seconds
                if part:
                    made.mark(part)
            clock.now += 0.125
        device.now += 2.0  # between the steps, until the next one's data
    module.synchronize = lambda: None
    assert made.seconds() == ([12.25], [parts | {"data": 3.0}])


@pytest.mark.parametrize(
    "options, blocks",
    [
        ("none", {"none": 4}),
        ("full", {"full": 4}),
        ("selective 3", {"full": 1, "none": 3}),
        ("selective op", {"selective": 4}),
        ("selective op --attention.backend=matmul", None),
        ("selective op --model.converters=float8", None),
        ("full --attention.backend=matmul", {"full": 4}),
        ("memory_budget --activation_checkpoint.memory_budget=0.8", {}),
        ("memory_budget --activation_checkpoint.memory_budget=0.79", None),
    ],
)
def test_hfu_counts_what_checkpointing_repeats(tmp_path, clock, options, blocks):
    given = f"--attention.backend=sdpa --compile.enable --activation_checkpoint.mode={options}"
    given = given.replace("selective ", "selective --activation_checkpoint.selective_ac_option=")
    made = recorder(tmp_path, *given.split(), peak=1e12)
    run_steps(made, clock, [1.0])
    report = made.finish(tmp_path)
    if blocks is None:
        assert report["hfu"] is None
        return
    repeated = 2 * repeated_flops(ARGS, Lengths(64, 24, 32), blocks)
    assert report["hfu"] - report["mfu"] == pytest.approx(repeated / 1e12, abs=1e-12)
    made.peak = None
    unknown = made._report([made.recording()])
    assert unknown["hfu"] is unknown["mfu"] is None and unknown["tflops_per_device"] > 0


def test_packed_samples_count_one_by_one(tmp_path):
    """Not as one sequence of the row's length; attention is that of packed rows."""
    full = "--activation_checkpoint.mode=full"
    made = recorder(tmp_path, "--data.batching=packed", full)
    lengths = [(64, 24, 32), (40, 10, 8)]
    packed = MicroBatch((1, 104, 34, 40), lengths, (), 2)
    exact = flops(*lengths)
    assert counted_flops(ARGS, 1000, [packed]) == [exact, exact, by_rule(1000, 64, 40)]
    repeated = sum(repeated_flops(ARGS, Lengths(*each), {"full": 4}) for each in lengths)
    assert repeated_by(made.job_config, ARGS, packed) == repeated
    made.steps, made._timed = [[packed, packed]], [[("", 0.0), ("", 1.0)]]
    assert made.recording().samples == 4
    assert made._report([made.recording()])["attention"] == "varlen"
