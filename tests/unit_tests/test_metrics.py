"""Metrics of a run: peaks, sums over micro-batches, padding, and the logs after a resume."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.clock import Clock
from tests.helpers.fake_ranks import fake_process_group
from tests.helpers.small_models import one_rank
from titan_tts.plan.step import Layout
from torchtitan.models.dit_tts import metrics as metrics_module
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.infra.divergence import StepStats
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor, eta, peak_flops
from torchtitan.models.dit_tts.model.args import TextEncoderSizes
from torchtitan.models.dit_tts.model.flops import Lengths, MicroBatch, training_flops

ARGS = model_flavors()["debug"]
LAYOUT = Layout(2, 2)


def test_peaks_of_devices():
    known = {"H200 NVL": 835, "GH200 480GB": 989, "H100 80GB HBM3": 989, "H100 PCIe": 756}
    known |= {"A100-SXM4-80GB": 312, "H100 NVL": 835, "H200": 989, "B200": 2250, "L40S": 362}
    for device, tflops in known.items():
        assert peak_flops(f"NVIDIA {device}", 0.0) == tflops * 1e12
        assert peak_flops(f"NVIDIA {device}", 500.0) == 500e12
    for device in ("", "NVIDIA H20", "NVIDIA RTX A1000", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"):
        assert peak_flops(device, 0.0) is None
        assert peak_flops(device, 500.0) == 500e12


def test_the_use_of_a_gpu_has_units_and_may_be_unknown(monkeypatch):
    values = {"power_draw": 250_000, "utilization": 75, "device_memory_used": 3 * 2**30}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert metrics_module.gpu_use() == {}  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = metrics_module.gpu_use()
    assert found == {"power_watts": 250.0, "utilization": 0.75, "memory_used_gib": 3.0}
    monkeypatch.delattr(torch.cuda, "utilization")  # a library that is not installed raises
    assert metrics_module.gpu_use() == {}


def batch(shape, frames, text_tokens, speaker_frames, text_rows=()) -> MicroBatch:
    return MicroBatch(shape, list(zip(frames, text_tokens, speaker_frames)), text_rows)


ONE = batch((1, 10, 10, 8), [10], [10], [8])
MIXED = batch((2, 100, 10, 8), [100, 20], [10, 3], [8, 3])


def flops(*lengths: tuple[int, int, int]) -> int:
    return sum(training_flops(ARGS, Lengths(*each)) for each in lengths)


def processor(*arguments: str) -> TTSMetricsProcessor:
    config = load_config(["--training.steps=20", "--metrics.no-enable-tensorboard", *arguments])
    made = TTSMetricsProcessor(config, one_rank(), ARGS)
    made.data_loading_times.append(0.0)
    return made


def rows(tmp_path) -> list[dict]:
    return JsonLines(tmp_path / "metrics.jsonl").read()


def stats(step: int, loss: float = 0.5, bad: bool = False) -> StepStats:
    return StepStats(step, step - 1, loss, 1.25, math.inf, math.inf, bad)


def log(metrics: TTSMetricsProcessor, step: int, loss: float = 0.5) -> None:
    metrics.count(ONE)
    metrics.collect(step, 0.1)
    metrics.log(stats(step, loss))


def started(tmp_path, *arguments: str, resumed_step: int = 0) -> TTSMetricsProcessor:
    made = processor(*arguments)
    made.start(resumed_step, tmp_path, JsonLines(tmp_path / "metrics.jsonl"))
    return made


def test_padding_of_a_packed_row_has_matmuls_and_no_attention():
    """Two samples, one empty slot and 16 frames of padding; the gradient of the latents is not computed."""
    lengths = [(64, 24, 32), (40, 10, 8)]
    metrics = processor()
    metrics.count(MicroBatch((1, 120, 34, 40), lengths, (), 3))
    D, counts = ARGS.dim, metrics.counts
    block = 10 * D * D + 6 * D * ARGS.mlp_dim
    frame = (
        3 * (ARGS.n_layers * block + 4 * ARGS.latent_channels * D) - 2 * ARGS.latent_channels * D
    )
    assert counts["executed_flops"] == flops(*lengths, (0, 0, 0)) + 16 * frame
    assert counts["useful_flops"] == flops(*lengths)
    assert (counts["samples"], counts["valid_frames"], counts["padded_frames"]) == (2, 104, 120)


def test_captions_of_a_packed_row_are_padded():
    """Two samples, one empty slot, and 12 of 15 places of captions that none has: their encoder computes them, keys and values too."""
    args, metrics = replace(ARGS, max_caption_tokens=5, caption_n_layers=3), processor()
    metrics.model_args = args
    metrics.count(
        MicroBatch((1, 104, 34, 40, 15), lengths := [(64, 24, 32, 3), (40, 10, 8, 0)], (), 3)
    )
    c, samples = args.speaker_dim, [*lengths, (0, 0, 0, 0)]
    place = 3 * (10 * c * c + 6 * c * args.speaker_mlp_dim) + args.n_layers * 4 * args.dim * c
    attention = 3 * 4 * c * (3 * 5**2 - 3**2)
    wanted = sum(training_flops(args, Lengths(*each)) for each in samples)
    assert metrics.counts["executed_flops"] == wanted + 3 * (12 * place + attention)


def test_count_sums_executed_and_useful_flops():
    """Of a text encoder what its passes execute, and the tokens of each text alone."""
    encoder = TextEncoderSizes(matmul_parameters=1000, n_layers=3, attention_dim=16, trained=False)
    with_encoder, metrics = processor(), processor()
    with_encoder.model_args = replace(ARGS, text_encoder_sizes=encoder)
    for each in (with_encoder, metrics):
        each.count(batch((3, 64, 24, 32), [64, 40, 7], [24, 10, 3], [32, 9, 0], [(1, 40), (2, 8)]))
        each.count(batch((2, 128, 40, 32), [100, 128], [40, 1], [30, 32]))
    counts = metrics.counts
    assert counts["executed_flops"] == flops(*[(64, 24, 32)] * 3 + [(128, 40, 32)] * 2)
    assert counts["useful_flops"] == flops(
        (64, 24, 32), (40, 10, 9), (7, 3, 0), (100, 40, 30), (128, 1, 32)
    )
    assert (counts["samples"], counts["valid_frames"]) == (5, 64 + 40 + 7 + 100 + 128)
    assert counts["padded_frames"] == 3 * 64 + 2 * 128

    def forward(*tokens):
        return sum(2 * 1000 * n + 4 * 3 * 16 * n**2 for n in tokens)

    assert with_encoder.counts["executed_flops"] - counts["executed_flops"] == forward(40, 8, 8)
    assert with_encoder.counts["useful_flops"] - counts["useful_flops"] == forward(24, 10, 3, 40, 1)


HELD_OUT = "--validation.path=/h --validation.freq=7"


@pytest.mark.parametrize(
    "arguments, logged",
    [
        ("--metrics.log_freq=6", [1, 6, 12, 18, 20]),
        ("--checkpoint.interval=4", [1, 4, 8, 12, 16, 20]),
        (f"{HELD_OUT} --samples.freq=5", [1, 5, 7, 10, 12, 14, 15, 20]),
        ("--validation.freq=7 --samples.freq=5", [1, 12, 20]),  # nothing is held out
        (f"{HELD_OUT} --validation.no-enable", [1, 12, 20]),
    ],
)
def test_steps_that_are_logged(arguments, logged):
    """First, last and regular ones, and those that are saved or validated."""
    metrics = processor("--metrics.log_freq=12", *arguments.split())
    assert [step for step in range(1, 21) if metrics.should_log(step)] == logged


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    for module in ("metrics", "infra.device_time"):
        monkeypatch.setattr(f"torchtitan.models.dit_tts.{module}.time", made)
    return made


def times_ranks(tensor: torch.Tensor, op=None, group=None) -> None:
    """An all-reduce over ranks that have the same."""
    tensor.mul_(torch.distributed.get_world_size(group))


def test_rates_are_of_all_ranks_and_mfu_and_use_of_one(tmp_path, clock, monkeypatch, caplog):
    caplog.set_level("INFO")
    config = processor("--metrics.peak_tflops=2").job_config
    readings = [{"power_watts": 300.0, "utilization": 0.5, "memory_used_gib": 70.0}, {}]
    with fake_process_group(LAYOUT) as dims:
        monkeypatch.setattr(torch.distributed, "all_reduce", times_ranks)
        monkeypatch.setattr("torchtitan.models.dit_tts.metrics.device_type", "cpu")
        metrics = TTSMetricsProcessor(config, dims, ARGS)
        monkeypatch.setattr(metrics_module, "gpu_use", lambda: readings.pop(0))
        metrics.start(0, tmp_path, JsonLines(tmp_path / "metrics.jsonl"))
        clock.now += 4.0
        peaks = [SimpleNamespace(max_active_gib=a, max_reserved_gib=r) for a, r in ((1, 2), (0, 3))]
        metrics.device_memory_monitor = SimpleNamespace(
            get_peak_stats=lambda: peaks[0], reset_peak_stats=lambda: peaks.append(peaks.pop(0))
        )
        metrics.skipped_batches, metrics.compiles = 3, 5
        metrics.count(MIXED, replaced=1)
        metrics.collect(1, 0.1)
        metrics.log(stats(1))
        metrics.peak, clock.now = None, clock.now + 1
        log(metrics, 2)
        assert metrics.max_memory_gib() == (1, 3)
    row, unknown = rows(tmp_path)
    assert (row["peak_allocated_gib"], row["peak_memory_gib"]) == (1, 2)
    assert (row["skipped_batches"], row["compiles"]) == (3, 5)
    assert "step: 1/20 (5%)  loss: 0.50000" in caplog.text and "ETA 0:01:16" in caplog.text
    assert (row["step"], row["loss"], row["grad_norm"], row["lr"]) == (1, 0.5, 1.25, 0.1)
    ranks = LAYOUT.gpus
    assert row["samples_per_second"] == 2 * ranks / 4
    assert row["audio_seconds_per_second"] == pytest.approx(120 / 25 * ranks / 4)
    assert row["replaced_samples"] == ranks
    padding = [row[f"{stream}padding_fraction"] for stream in ("", "text_", "reference_")]
    assert padding == pytest.approx([80 / 200, 7 / 20, 5 / 16])
    long, short = flops((100, 10, 8)), flops((20, 3, 3))
    assert row["tflops_per_device"] == pytest.approx(2 * long / 4 / 1e12)
    assert row["mfu"] == pytest.approx(2 * long / 4 / 2e12)
    assert row["goodput_mfu"] == pytest.approx((long + short) / 4 / 2e12)
    names = ("gpu_power_watts", "gpu_utilization", "gpu_memory_used_gib")
    assert [row[name] for name in names] == [300.0, 0.5, 70.0]
    assert [unknown[name] for name in (*names, "mfu", "goodput_mfu")] == [None] * 5


def test_times_are_of_this_life(tmp_path, one_process_group, clock):
    """Steps before the resume and time before the start count neither for speed nor for the ETA."""
    metrics = processor()
    clock.now += 1000.0  # compiling, opening the data
    metrics.start(8, tmp_path, JsonLines(tmp_path / "metrics.jsonl"))
    for step, seconds, loading in ((10, 6.0, [0.5, 1.0]), (14, 20.0, [2.0])):
        clock.now += seconds
        metrics.data_loading_times.extend(loading)
        log(metrics, step)
    found = rows(tmp_path)
    assert [row["seconds_per_step"] for row in found] == [3.0, 5.0]
    assert [row["data_loading_fraction"] for row in found] == [0.25, 0.1]
    assert [row["samples_per_second"] for row in found] == [1 / 6, 1 / 20]
    assert [row["progress"] for row in found] == [0.5, 0.7]
    # 2 steps in 6 s and 10 are left; then 6 in 26 s and 6 are left.
    assert [row["eta_seconds"] for row in found] == pytest.approx([30.0, 26.0])
    assert eta(26.9) == "0:00:26" and eta(90_125) == "1 day, 1:02:05"
    clock.now += 50.0
    metrics.exclude_time(40.0)
    log(metrics, 18)
    assert rows(tmp_path)[-1]["seconds_per_step"] == pytest.approx(2.5)
    clock.now += 60.0
    log(metrics, 20)
    assert rows(tmp_path)[-1]["seconds_per_step"] == pytest.approx(30.0)


def test_a_step_is_logged_once_its_stats_are_known(tmp_path, one_process_group, clock):
    """In the next one, on a GPU: with its own counts and time. A bad step's count for the next row."""
    metrics = started(tmp_path)

    def collected(step: int) -> None:
        metrics.count(ONE)
        clock.now += 2.0
        metrics.data_loading_times.append(0.5)
        metrics.collect(step, 0.1)

    def next_step() -> None:
        metrics.count(MIXED)
        metrics.data_loading_times.append(1.0)
        clock.now += 5.0

    collected(1)
    next_step()
    metrics.log(stats(1))
    metrics.log(stats(2))  # it was not to be logged
    collected(3)
    next_step()
    metrics.log(stats(3, bad=True))
    collected(3)
    metrics.log(stats(3))
    first, last = rows(tmp_path)
    assert (first["samples_per_second"], first["data_loading_fraction"]) == (1 / 2, 0.25)
    # Two batches of two samples, and step 3 twice, in 14 s.
    assert (last["samples_per_second"], last["data_loading_fraction"]) == (6 / 14, 3 / 14)


def test_names_are_grouped_and_a_return_to_a_checkpoint_forgets_counts(tmp_path, one_process_group):
    metrics = started(tmp_path)
    logged: list[dict] = []
    metrics.trackers = SimpleNamespace(
        log=lambda values, step: logged.append(values), continue_after=lambda step: None
    )
    log(metrics, 1)
    assert {name.partition("/")[0] for name in logged[0]} == {"loss", "train", "speed"}
    assert {"train/lr", "train/progress", "speed/mfu"} <= logged[0].keys()
    metrics.count(MIXED)
    metrics.start(1, tmp_path, JsonLines(tmp_path / "metrics.jsonl"))
    log(metrics, 2)
    assert rows(tmp_path)[-1]["padding_fraction"] == 0


@pytest.mark.long
@pytest.mark.parametrize("checkpoint", [0, 2])
def test_a_resume_replaces_the_steps_it_trains_again(
    tmp_path, one_process_group, monkeypatch, checkpoint
):
    """Also a run that starts again because it was killed before its first checkpoint."""
    file = JsonLines(tmp_path / "metrics.jsonl")
    for begin, losses in ((0, [1.0] * 4), (checkpoint, [0.5])):
        metrics = started(tmp_path, "--metrics.enable-tensorboard", resumed_step=begin)
        for step, loss in enumerate(losses, begin + 1):
            log(metrics, step, loss)
        metrics.close()
        file.keep_until(checkpoint)
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("loss")
    expected = [(1, 1.0), (2, 1.0), (3, 0.5)] if checkpoint else [(1, 0.5)]
    assert [(event.step, event.value) for event in events] == expected
    assert [(row["step"], row["loss"]) for row in file.read()] == expected[:checkpoint]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    other = started(tmp_path / "other", "--metrics.enable-tensorboard")
    log(other, 1)
    other.close()
    assert other.trackers is None and not (tmp_path / "other").exists()
