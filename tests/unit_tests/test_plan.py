"""titan-tts plan: its FLOPs are the formula's, its passes tell other shapes, and it fits constants."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.cli import main
from torchtitan.models.dit_tts.config import load_config
from torchtitan.models.dit_tts.model.args import TextEncoderSizes
from torchtitan.models.dit_tts.model.flops import Lengths, text_encoder_flops, training_flops
from torchtitan.models.dit_tts.planning.activations import measure
from torchtitan.models.dit_tts.planning.after_run import RanShape, write_plan
from torchtitan.models.dit_tts.planning.calibrate import Observation, fit
from torchtitan.models.dit_tts.planning.communication import communication
from torchtitan.models.dit_tts.planning.compiled_block import BlockCompiler
from torchtitan.models.dit_tts.planning.constants import NAMES, guesses, load, save
from torchtitan.models.dit_tts.planning.devices import DEVICES, cluster_of, device_of, find_device
from torchtitan.models.dit_tts.planning.flops_split import split_flops
from torchtitan.models.dit_tts.planning.forecast import Forecaster, layout_of
from torchtitan.models.dit_tts.planning.forecast_report import as_json, grid_lines
from torchtitan.models.dit_tts.planning.grid import grid
from torchtitan.models.dit_tts.planning.operations import ATTENTION, PRODUCT, OperationRecorder
from torchtitan.models.dit_tts.planning.parameters import model_sizes
from torchtitan.models.dit_tts.planning.profile import Profiler, Shape
from torchtitan.models.dit_tts.planning.states import Layout, state_memory
from torchtitan.models.dit_tts.planning.step_time import step_time, with_error

ROOT = Path(__file__).resolve().parents[2]
DEBUG = ROOT / "train_configs/debug.toml"
H200 = find_device("H200")
SMALL = ["--data.max_frames=64", "--data.num_buckets=2", "--training.mixed_precision_param=bfloat16"]


def debug_config(*arguments: str):
    return load_config([f"--job.config_file={DEBUG}", *SMALL, *arguments])


def forecaster(config, gpus: int = 1, device=H200, *, shorter: bool = False) -> Forecaster:
    return Forecaster(config, cluster_of(device, gpus, gpus), guesses(), shorter=shorter)


# FLOPs


@pytest.mark.parametrize("flavor", ["debug", "800M", "3B", "8B"])
@pytest.mark.parametrize("lengths", [Lengths(768, 192, 384), Lengths(123, 7, 33), Lengths(40, 0, 0)])
def test_the_split_is_the_formula(flavor, lengths):
    args = model_flavors()[flavor]
    sizes = TextEncoderSizes(10**8, 18, 640, trained=False)
    for each in (
        args,
        replace(args, text_vocab_size=259),
        replace(args, condition_ids=3),
        replace(args, text_encoder_sizes=sizes),
    ):
        split = split_flops(each, lengths)
        assert split.model == training_flops(each, lengths)
        assert min(split.linear, split.attention, split.modulation, split.conditioning) >= 0
    assert split.text_encoder == text_encoder_flops(sizes, 1, lengths.text_tokens)


def test_recorded_products_are_the_formulas():
    """Every product of a pass, with attention's own count of 4 forward and 8 backward."""
    config = debug_config()
    args, lengths = model_sizes(config).args, Lengths(64, 40, 64)
    recorder = OperationRecorder()
    measure(config, args, 2, lengths, "none", sharded=True, recorder=recorder)
    rows = recorder.operations()
    flops = rows.factors.prod(1)
    attention = rows.kind == ATTENTION
    # The formula counts the backward pass as twice the forward; kernels compute the scores again.
    as_formula = np.where(attention & rows.backward, flops * 8 / 10, flops)
    counted = as_formula[attention | (rows.kind == PRODUCT)].sum()
    assert counted == 2 * training_flops(args, lengths)


# Passes


@pytest.mark.parametrize("compiled", [False, True])
def test_passes_tell_what_other_shapes_take(compiled):
    """Samples, frames, text, blocks and speaker blocks that were not run, against a pass with them."""
    config = debug_config(*["--compile.enable"] * compiled)
    args = replace(model_sizes(config).args, n_layers=4, speaker_n_layers=3)
    longest = Lengths(64, 40, 64)
    profile = Profiler(args, longest).profile(config, sharded=True, shorter=True)
    recorder = OperationRecorder()
    real = measure(
        config, args, 5, Lengths(40, 24, 64), "none", sharded=True, recorder=recorder,
        compiler=BlockCompiler(False) if compiled else None,
    )  # fmt: skip
    predicted = profile.memory(Shape(5, 40, 24))
    assert predicted.batch == real.batch
    assert predicted.saved == pytest.approx(real.saved, rel=2e-3)
    rows = recorder.operations()
    work = profile.work(H200, Shape(5, 40, 24))
    assert work.kernels.sum() == len(rows.kind)
    attention = rows.factors.prod(1)[rows.kind == ATTENTION].sum() / H200.peak_flops
    assert work.attention_seconds.sum() == pytest.approx(attention, rel=1e-9)
    assert (work.fused_seconds.sum() > 0) == compiled


def test_what_the_compiler_does_to_a_block():
    config, lengths = debug_config(), Lengths(64, 40, 64)
    args = replace(model_sizes(config).args, speaker_n_layers=1)
    found = {}
    for kind in ("none", "selective", "full"):
        for compiled in (False, True):
            recorder = OperationRecorder()
            compiler = BlockCompiler(kind == "selective") if compiled else None
            memory = measure(
                config, args, 2, lengths, kind, sharded=True, compiler=compiler, recorder=recorder
            )
            rows = recorder.operations()
            products = rows.factors.prod(1)[rows.kind == PRODUCT].sum()
            found[kind, compiled] = memory.saved, products, len(rows.kind)
    saved = {key: value[0] for key, value in found.items()}
    assert saved["none", True] < 0.8 * saved["none", False]
    assert saved["full", True] == saved["full", False]
    assert saved["full", True] < saved["selective", True] < saved["none", True]
    for kind in ("none", "selective", "full"):
        assert found[kind, True][2] < 0.6 * found[kind, False][2]  # fewer kernels, the same products
        assert found[kind, True][1] == pytest.approx(found[kind, False][1], rel=0.01)
    assert found["full", True][1] > found["selective", True][1] > found["none", True][1]


# Memory


@pytest.mark.parametrize("state_dtype, bytes_each", [("float32", 4), ("bfloat16", 2)])
def test_moments_take_what_their_precision_says(state_dtype, bytes_each):
    config = debug_config(f"--optimizer.state_dtype={state_dtype}")
    args = model_sizes(config).args
    states = state_memory(config, args, None, Layout(1, 1))
    assert states.optimizer == pytest.approx(2 * bytes_each * states.gradients / 4, rel=0.03)


def test_eight_bit_moments_are_torchaos():
    from torchtitan.models.dit_tts import get_train_spec
    from torchtitan.models.dit_tts.infra.adamw_states import build_8bit_adamw

    config = debug_config("--optimizer.state_dtype=8bit")
    args = model_sizes(config).args
    model = get_train_spec().model_cls(args)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_8bit_adamw([{"params": list(model.parameters())}])
    optimizer.step()
    real = 0
    for state in optimizer.state.values():
        for value in state.values():
            names = ("codes", "scale", "qmap")
            inner = [getattr(value, n) for n in names] if hasattr(value, "codes") else [value]
            real += sum(tensor.nbytes for tensor in inner)
    assert state_memory(config, args, None, Layout(1, 1)).optimizer == pytest.approx(real, rel=1e-3)


def test_the_largest_micro_batch_is_the_last_that_fits():
    config = debug_config()
    planner = forecaster(config)
    lengths, layout = Lengths(64, 40, 64), Layout(1, 1)
    small = replace(H200, memory_gib=3.0)
    planner.cluster = cluster_of(small, 1, 1)
    largest = planner.largest(config, layout, lengths)
    assert largest > 8
    assert planner.memory(config, layout, lengths, largest).fits
    assert not planner.memory(config, layout, lengths, largest + 1).fits
    planner.cluster = cluster_of(replace(H200, memory_gib=1.0), 1, 1)
    assert planner.largest(config, layout, lengths) == 0


# Communication


def test_volumes_are_those_of_ring_collectives():
    """3B at 64 ranks: all-gather 3.88 and reduce-scatter 4.01 bytes a parameter were measured, with the
    units that stay whole and the padding of shards; HSDP reduces 4 / shards over replicas."""
    config = debug_config("--training.mixed_precision_param=bfloat16")
    args = model_sizes(config).args
    n = 10**9
    cluster = cluster_of(H200, 64, 8)
    found = {}
    for layout in (Layout(1, 64), Layout(8, 8), Layout(64, 1)):
        states = state_memory(config, args, None, layout)
        kept = states.gathered.kept if layout.sharded else 0
        each = communication(config, n, states, layout, cluster, 10, 2)
        found[layout.name] = {c.name: c.volume / n for c in each.collectives}
        if layout.sharded:
            gathered = sum(v for name, v in found[layout.name].items() if "gather" in name)
            share = (layout.shards - 1) / layout.shards
            assert gathered == pytest.approx(2 * share * (4 - kept / n))
            assert found[layout.name]["reduce-scatter"] == pytest.approx(2 * share * 4)
    assert found["HSDP"]["all-reduce"] == pytest.approx(2 * 2 * 7 / 8 * 4 / 8)
    # DDP exchanges once a step, whatever the accumulation: 8 N / B a node for many nodes.
    assert found["DDP"]["all-reduce"] == pytest.approx(2 * 63 / 64 * 4)
    layout = Layout(64, 1)
    states = state_memory(config, args, None, layout)
    ddp = communication(config, n, states, layout, cluster, 10, 2)
    assert ddp.seconds("backward") == pytest.approx(8 * n / cluster.inter_node * 7 / 8)
    assert ddp.overlaps(0.0, ddp.seconds("backward") / 0.9, 1.0)
    assert not ddp.overlaps(0.0, ddp.seconds("backward"), 1.0)


# Time


def test_an_error_bar_is_as_wide_as_the_constants_are_unsure():
    config = debug_config()
    work = forecaster(config).work(config, Layout(1, 1), Lengths(64, 40, 64), 12, 1)
    wide = with_error(lambda c: step_time(work, c).seconds, guesses())
    sure = guesses()
    sure = type(sure)(sure.values, sure.covariance * 0, 0.0, "known")
    narrow = with_error(lambda c: step_time(work, c).seconds, sure)
    assert narrow.low == narrow.middle == narrow.high == wide.middle
    assert wide.high / wide.middle == pytest.approx(wide.middle / wide.low)
    assert wide.high > 1.1 * wide.middle


def observations(truth, noise: float = 0.0) -> list[Observation]:
    """Steps at sizes where each constant matters somewhere, timed by known constants."""
    config = debug_config("--model.flavor=800M")
    planner = forecaster(config)
    generator = np.random.default_rng(0)
    found = []
    for samples in (1, 8, 64, 256):
        work = planner.work(config, Layout(1, 1), Lengths(64, 40, 64), samples, 1)
        each = work.micro_batch
        # Kinds of work in other shares, as other sizes of the model would have them: in steps that are
        # alike, products and pointwise operations could not be told apart.
        for products, attention in ((1, 1), (10, 1), (1, 100), (0.2, 5)):
            other = replace(
                each,
                product_seconds=products * each.product_seconds,
                attention_seconds=attention * each.attention_seconds,
            )
            step = replace(work, micro_batch=other)
            seconds = step_time(step, truth).seconds * np.exp(noise * generator.normal())
            found.append(Observation(f"{samples} samples", seconds, step))
    return found


def test_calibration_finds_the_constants_that_made_the_times():
    truth = guesses()
    changed = {
        "gemm_efficiency": 0.62, "attention_efficiency": 0.55, "memory_efficiency": 0.88,
        "kernel_seconds": 3.5e-6,
    }  # fmt: skip
    truth = type(truth)({**truth.values, **changed}, truth.covariance, 0.0, "truth")
    fitted, residuals = fit(observations(truth), "test")
    for name, value in changed.items():
        assert fitted[name] == pytest.approx(value, rel=0.02), name
    assert max(abs(each.relative) for each in residuals) < 0.01
    # What nothing measured stays a guess, as unsure as before.
    free = NAMES.index("network_efficiency")
    assert fitted["network_efficiency"] == pytest.approx(guesses()["network_efficiency"])
    assert fitted.covariance[free, free] == pytest.approx(guesses().covariance[free, free])

    noisy, residuals = fit(observations(truth, noise=0.05), "test")
    assert 0.02 < noisy.unexplained < 0.1
    for name, value in changed.items():
        deviation = np.sqrt(noisy.covariance[NAMES.index(name)][NAMES.index(name)])
        assert abs(np.log(noisy[name] / value)) < 4 * deviation, name


def test_one_run_narrows_little():
    fitted, _ = fit(observations(guesses())[:1], "test")
    assert fitted.unexplained == guesses().unexplained
    narrower = np.diag(fitted.covariance) <= np.diag(guesses().covariance) * (1 + 1e-9)
    assert narrower.all()


def test_constants_are_kept(tmp_path):
    path = tmp_path / "constants.json"
    save(path, "H100", guesses())
    save(path, "H200", guesses().moved(0, 0.1))
    assert load(path, "H200").values == guesses().moved(0, 0.1).values
    assert load(path, "H100").values == guesses().values
    (tmp_path / "bad.json").write_text('{"H100": {"values": {}}}')
    for file, device, words in (
        (path, "A100", "no constants of A100"),
        (tmp_path / "none.json", "H100", "cannot be read"),
        (tmp_path / "bad.json", "H100", "calibrate again"),
    ):
        with pytest.raises(ValueError, match=words):
            load(file, device)


def test_devices_are_known_by_what_drivers_call_them():
    for reported, name in (
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
    ):
        device = device_of(reported)
        assert (device and device.name) == name
    assert all(device.peak_flops > 3e14 for device in DEVICES)


# Grid and command


def test_the_grid_drops_nothing():
    config = debug_config("--training.global_batch_size=16")
    small = replace(H200, memory_gib=1.68)
    choices = grid(config, cluster_of(small, 1, 1), guesses())
    assert len(choices) == 4 * 2 * 5  # checkpointing x compile x 1, 2, 4, 8, 16
    fits = [choice.fits for choice in choices]
    assert any(fits) and not all(fits)
    assert fits == sorted(fits, reverse=True)
    speeds = [choice.step.samples_per_second.middle for choice in choices if choice.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert all(choice.micro_batch * choice.accumulation == 16 for choice in choices)
    assert len(grid_lines(choices, cluster_of(small, 1, 1), guesses())) >= len(choices)
    first, *_, last = json.loads(json.dumps(as_json(choices)))
    assert first["fits"] and not last["fits"]
    assert first["step"]["seconds"]["low"] < first["step"]["seconds"]["high"]


def test_what_cannot_fit_is_shown():
    config = debug_config("--model.flavor=800M", "--training.global_batch_size=16")
    cluster = cluster_of(replace(H200, memory_gib=1.6), 16, 8)
    choices = grid(config, cluster, guesses())
    assert {choice.layout.name for choice in choices} == {"DDP", "FSDP2", "HSDP"}
    assert len(choices) == 3 * 4 * 2 and not any(choice.fits for choice in choices)
    said = "\n".join(grid_lines(choices, cluster, guesses()))
    assert said.count("states alone") == len(choices)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    plan = ["plan", str(DEBUG), "--gpus-per-node", "2", *SMALL, "--data.bucket_frames", "32,64"]
    assert main([*plan, "--gpu", "H100"]) == 0
    said = capsys.readouterr().out
    for words in ("H100", "guesses, not calibrated", "all-gather, forward", "largest micro-batch", "MFU"):
        assert words in said
    run = {
        "config": {"data": {"max_frames": 64}, "training": {"global_batch_size": 8}},
        "gpus": 1,
        "environment": {"device": "NVIDIA H100 80GB HBM3"},
        "peak_memory_gib": 1.0,
        "shapes": [
            {"samples": 8, "frames": 64, "text_tokens": 40, "speaker_frames": 64, "steps": 5,
             "micro_batches": 5, "seconds_per_step": {"median": 0.01}},
        ],
    }  # fmt: skip
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"runs": [run]}))
    assert main(["plan", "--calibrate", str(results)]) == 0
    said = capsys.readouterr().out
    assert "measured 0.0100 s" in said and "peak memory measured 1.00 GiB" in said
    assert load(None, "H100").origin.startswith(str(tmp_path))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["plan"], "needs a config file"),
        (["plan", str(DEBUG), "--gpu", "H300"], "allowed are A100"),
        (["plan", str(DEBUG), "--model.flavour=3B"], "did you mean"),
        (["plan", str(DEBUG), "--nodes", "0"], "at least 1"),
        (["plan", "--calibrate", "nowhere.json"], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""


# After a run


def test_a_run_keeps_the_plan_beside_what_was_measured(tmp_path):
    config = debug_config()
    rows = [
        {"step": step, "time": 10.0 + step, "seconds_per_step": seconds, "mfu": 0.3, "goodput_mfu": None,
         "samples_per_second": 5.0, "peak_memory_gib": 2.0 + step}
        for step, seconds in ((0, 99.0), (1, 9.0), (2, 0.5), (3, 0.7))
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shapes = [RanShape(12, Lengths(64, 40, 64), 3), RanShape(24, Lengths(32, 40, 64), 1)]

    def written(device: str) -> dict:
        write_plan(tmp_path, config, 1, 1, device, shapes, since=10.5)
        return json.loads((tmp_path / "plan.json").read_text())

    on_cpu = written("cpu")
    assert on_cpu["predicted"] is None and "cpu" in on_cpu["note"]
    assert on_cpu["measured"]["seconds_per_step"] == pytest.approx(0.6)  # the first compiles
    assert on_cpu["measured"]["peak_memory_gib"] == 5.0 and on_cpu["measured"]["goodput_mfu"] is None
    on_gpu = written("NVIDIA H200")
    assert on_gpu["measured"] == on_cpu["measured"]
    low, high = on_gpu["predicted"]["seconds_per_step_range"]
    assert low < on_gpu["predicted"]["seconds_per_step"] < high
    assert 0 < on_gpu["predicted"]["mfu"] < 1 and on_gpu["predicted"]["peak_memory_gib"] > 0


def test_layout_comes_from_the_degrees():
    config = debug_config("--parallelism.data_parallel_replicate_degree=2")
    assert layout_of(config, 8) == Layout(2, 4)
