"""titan-tts plan: its FLOPs are the formula's, its passes tell other shapes, and what it says is so."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.plan_cases import DEBUG, H200, SMALL, debug_config
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.cli import main
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.args import TextEncoderSizes
from torchtitan.models.dit_tts.model.flops import Lengths, text_encoder_flops, training_flops
from torchtitan.models.dit_tts.plan.activations import measure
from torchtitan.models.dit_tts.plan.compare import RanShape, write_plan
from torchtitan.models.dit_tts.plan.compiled_block import ModelCompiler, compiled_stacks
from torchtitan.models.dit_tts.plan.constants import load
from torchtitan.models.dit_tts.plan.devices import (
    DEVICES,
    check_device,
    device_of,
    find_device,
    with_peak,
)
from torchtitan.models.dit_tts.plan.flops_split import split_flops
from torchtitan.models.dit_tts.plan.forecast import layout_of
from torchtitan.models.dit_tts.plan.operations import ATTENTION, PRODUCT, OperationRecorder
from torchtitan.models.dit_tts.plan.parameters import model_sizes
from torchtitan.models.dit_tts.plan.profile import Profiler, Shape
from torchtitan.models.dit_tts.plan.states import DataParallelLayout, state_memory

pytestmark = pytest.mark.usefixtures("remembered_passes")


# FLOPs


@pytest.mark.parametrize("flavor", ["debug", "800M", "3B", "8B"])
@pytest.mark.parametrize(
    "lengths", [Lengths(768, 192, 384), Lengths(123, 7, 33), Lengths(40, 0, 0)]
)
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    "components", [[], pytest.param(["model", "encoders"], marks=pytest.mark.slow)]
)
def test_passes_tell_what_other_shapes_take(components):
    """Samples, frames, text, blocks and speaker blocks that were not run, against a pass with them."""
    compiled = components and ["--compile.enable", "--compile.components", *components]
    config = debug_config(*compiled)
    assert compiled_stacks(config) == tuple(components)
    args = replace(model_sizes(config).args, n_layers=4, speaker_n_layers=3)
    longest = Lengths(64, 40, 64)
    profile = Profiler(args, longest, 5).profile(config, sharded=True, shorter=True)
    recorder = OperationRecorder()
    real = measure(
        config,
        args,
        5,
        Lengths(40, 24, 64),
        "none",
        sharded=True,
        recorder=recorder,
        compiler=ModelCompiler(compiled_stacks(config)),
    )
    predicted = profile.memory(Shape(5, 40, 24))
    assert predicted.batch == real.batch
    # Tables of angles grow with the frames and not with the samples: two thousandths of so small a model.
    assert predicted.saved == pytest.approx(real.saved, rel=4e-3)
    rows = recorder.operations()
    work = profile.work(H200, Shape(5, 40, 24))
    assert work.kernels.sum() == len(rows.kind)
    attention = rows.factors.prod(1)[rows.kind == ATTENTION].sum() / H200.peak_flops
    assert work.attention_seconds.sum() == pytest.approx(attention, rel=1e-9)
    assert (work.fused_seconds.sum() > 0) == bool(compiled)


@pytest.mark.slow
def test_what_the_compiler_does_to_a_block():
    config, lengths = debug_config(), Lengths(64, 40, 64)
    args = replace(model_sizes(config).args, speaker_n_layers=1)
    found = {}
    for kind in ("none", "selective", "full"):
        for compiled in (False, True):
            recorder = OperationRecorder()
            compiler = ModelCompiler(["model"] * compiled, kind == "selective")
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
        assert (
            found[kind, True][2] < 0.6 * found[kind, False][2]
        )  # fewer kernels, the same products
        assert found[kind, True][1] == pytest.approx(found[kind, False][1], rel=0.01)
    assert found["full", True][1] > found["selective", True][1] > found["none", True][1]
    recorder, encoders = OperationRecorder(), ModelCompiler(["encoders"])
    memory = measure(
        config, args, 2, lengths, "none", sharded=True, compiler=encoders, recorder=recorder
    )
    kernels = found["none", False][2]
    assert memory.saved < saved["none", False] and len(recorder.operations().kind) < kernels


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
def test_a_memory_budget_is_the_compilers(sharded):
    """What it keeps is decided at each shape: a profile must tell what passes of that shape hold."""
    budget = ["--compile.enable", "--compile.components", "model"]
    budget += ["--activation_checkpoint.mode=memory_budget"]
    config = debug_config(*budget, "--activation_checkpoint.memory_budget=0.5")
    args = replace(model_sizes(config).args, n_layers=3, speaker_n_layers=1)
    longest, shape = Lengths(64, 40, 64), Shape(8, 32, 24)
    lengths = Lengths(shape.frames, shape.text_tokens, 64)

    def kept(budget: float) -> int:
        compiler = ModelCompiler(compiled_stacks(config), budget=budget)
        memory = measure(
            config,
            args,
            shape.samples,
            lengths,
            "memory_budget",
            sharded=sharded,
            compiler=compiler,
        )
        return memory.saved

    profile = Profiler(args, longest, 4).profile(config, sharded=sharded, shorter=True)
    assert profile.memory(shape).saved == kept(0.5) < kept(1.0)


# Memory


@pytest.mark.parametrize("state_dtype, bytes_each", [("float32", 4), ("bfloat16", 2)])
def test_moments_take_what_their_precision_says(state_dtype, bytes_each):
    config = debug_config(f"--optimizer.state_dtype={state_dtype}")
    args = model_sizes(config).args
    states = state_memory(config, args, None, DataParallelLayout(1, 1))
    assert states.optimizer == pytest.approx(2 * bytes_each * states.gradients / 4, rel=0.03)


@pytest.mark.long
def test_eight_bit_moments_are_torchaos():
    from torchtitan.models.dit_tts import get_train_spec
    from torchtitan.models.dit_tts.infra.low_precision_adamw import build_8bit_adamw

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
    assert state_memory(config, args, None, DataParallelLayout(1, 1)).optimizer == pytest.approx(
        real, rel=1e-3
    )


# Devices


def test_devices_are_known_by_what_drivers_call_them():
    for reported, name in (
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
    ):
        device = device_of(reported)
        assert (device and device.name) == name
    assert all(device.peak_flops > 3e14 for device in DEVICES)
    assert find_device("H100 NVL").peak_flops == 835e12
    assert with_peak(H200, debug_config("--metrics.peak_tflops=500")).peak_flops == 500e12


def test_what_a_device_cannot_train():
    check_device(debug_config(), H200)
    with pytest.raises(InputError, match="mixed_precision_param = 'float32'"):
        check_device(debug_config("--training.mixed_precision_param=float32"), H200)
    fp8 = debug_config("--model.converters=float8")
    check_device(fp8, H200)
    with pytest.raises(InputError, match="the A100 has none"):
        check_device(fp8, find_device("A100"))


# Command


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_the_command(gpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    plan = [
        "plan",
        str(DEBUG),
        "--gpus-per-node",
        str(gpus),
        *SMALL,
        "--data.bucket_frames",
        "32,64",
    ]
    assert main([*plan, "--gpu", "H100"]) == 0
    said = capsys.readouterr().out
    for words in ("H100", "guesses, not calibrated", "largest micro-batch", "MFU"):
        assert words in said
    assert ("all-gather, forward" in said) == (gpus > 1)
    run = {
        "config": {
            "data": {"max_frames": 64, "max_text_tokens": 40, "max_speaker_frames": 64},
            "training": {"global_batch_size": 8, "mixed_precision_param": "bfloat16"},
            "encoder": {"n_layers": 1, "n_heads": 2},
            "compile": {"components": ["model"]},
        },
        "gpus": 1,
        "environment": {"device": "NVIDIA H100 80GB HBM3"},
        "peak_memory_gib": 1.0,
        "shapes": [
            {
                "samples": 8,
                "frames": 64,
                "text_tokens": 40,
                "speaker_frames": 64,
                "steps": 5,
                "micro_batches": 5,
                "seconds_per_step": {"median": 0.01},
            },
        ],
    }
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
        (["plan", str(DEBUG), "--gpus-per-node", "1"], "mixed_precision_param = 'float32'"),
        (
            ["plan", str(DEBUG), "--gpus-per-node", "1", *SMALL, "--attention.backend=flex"],
            "'flex' needs",
        ),
        (["plan", "--calibrate", "nowhere.json"], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""


# After a run


@pytest.mark.long
def test_a_run_keeps_the_plan_beside_what_was_measured(tmp_path):
    config = debug_config()
    rows = [
        {
            "step": step,
            "time": 10.0 + step,
            "seconds_per_step": seconds,
            "mfu": 0.3,
            "goodput_mfu": None,
            "samples_per_second": 5.0,
            "peak_allocated_gib": 2.0 + step,
        }
        for step, seconds in ((0, 99.0), (1, 9.0), (2, 0.5), (3, 0.7))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shapes = [RanShape(12, Lengths(64, 40, 64), 3), RanShape(24, Lengths(32, 40, 64), 1)]

    def written(device: str) -> dict:
        write_plan(tmp_path, config, 1, 1, device, shapes, since=10.5)
        return json.loads((tmp_path / "plan.json").read_text())

    on_cpu = written("cpu")
    assert on_cpu["predicted"] is None and "cpu" in on_cpu["note"]
    assert on_cpu["measured"]["seconds_per_step"] == pytest.approx(0.6)  # the first compiles
    assert (
        on_cpu["measured"]["peak_memory_gib"] == 5.0 and on_cpu["measured"]["goodput_mfu"] is None
    )
    on_gpu = written("NVIDIA H200")
    assert on_gpu["measured"] == on_cpu["measured"]
    low, high = on_gpu["predicted"]["seconds_per_step_range"]
    assert low < on_gpu["predicted"]["seconds_per_step"] < high
    assert 0 < on_gpu["predicted"]["mfu"] < 1 and on_gpu["predicted"]["peak_memory_gib"] > 0


def test_layout_comes_from_the_degrees():
    config = debug_config("--parallelism.data_parallel_replicate_degree=2")
    assert layout_of(config, 8) == DataParallelLayout(2, 4)
