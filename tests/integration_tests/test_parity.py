"""The same training on every layout: losses and gradient norms agree within 1e-5, and what validation
measures within 1e-6."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tools.harness import runs
from tools.harness.synthetic import make_shards

STEPS = 4

FSDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]
DDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_replicate_degree=2"]
HSDP = [*DDP, "--training.local_batch_size=2", "--parallelism.data_parallel_shard_degree=2"]
NEVER = "--parallelism.fsdp_reshard_after_forward=never"
TP = ["--parallelism.backend=megatron", "--parallelism.tensor_parallel_degree=2"]
TP_4 = [*TP, "--parallelism.tensor_parallel_degree=4"]
SEQUENCE = [*TP, "--megatron.sequence_parallel"]

# The decoder's blocks; the case "compile" has the encoders' too, the noising and the loss.
INDUCTOR = ["--compile.enable", "--compile.components", "model"]
# Traces, partitions and runs the graphs; Inductor's kernels take minutes to compile.
TRACED = [*INDUCTOR, "--compile.backend=aot_eager"]
WHOLE = ["--compile.backend=aot_eager", *INDUCTOR, "encoders", "loss"]
TUNED = "--compile.mode=max-autotune-no-cudagraphs"

FULL, BUDGET = (f"--activation_checkpoint.mode={each}" for each in ("full", "memory_budget"))
SELECTIVE = "--activation_checkpoint.mode=selective"
PER_OP = [SELECTIVE, "--activation_checkpoint.selective_ac_option=op"]
VARLEN_PER_OP = ["--attention.backend=varlen", *PER_OP]

# name -> (selection that runs it, processes, arguments). The matrix has what other layouts test in parts.
LAYOUTS = {
    "accumulation": ("", 1, ["--training.local_batch_size=4"]),
    "ddp": ("", 2, DDP),
    "fsdp": ("", 2, FSDP),
    "compile": ("", 1, WHOLE),
    "hsdp": ("slow", 4, HSDP),
    # Weights that stay gathered over two micro-batches.
    "fsdp_never": ("slow", 2, [*FSDP, "--training.local_batch_size=2", NEVER]),
    "fsdp_compile_checkpointing": ("slow", 2, [*FSDP, *TRACED, FULL]),
    "tp": ("slow", 2, TP),
    # With kernels by Inductor, which are also others than eager's.
    "fsdp_inductor_checkpointing": ("slow", 2, [*FSDP, *INDUCTOR, FULL]),
    "ddp_accumulation": ("matrix", 2, [*DDP, "--training.local_batch_size=2"]),
    "hsdp_accumulation": ("matrix", 4, [*HSDP, "--training.local_batch_size=1"]),
    "every_2nd_block": ("matrix", 1, [SELECTIVE, "--activation_checkpoint.selective_ac_option=2"]),
    "per_op_checkpointing": ("matrix", 1, PER_OP),
    "fsdp_memory_budget": ("matrix", 2, [*FSDP, *TRACED, BUDGET]),
    "tp_fsdp_compile_per_op": ("matrix", 4, [*TP, *FSDP, *TRACED, *PER_OP]),
    "inductor": ("matrix", 1, ["--compile.enable"]),
    "hsdp_inductor_tuned_varlen_per_op": (
        "matrix",
        4,
        [*HSDP, *INDUCTOR, *VARLEN_PER_OP, TUNED],
    ),
    "tp_1": ("matrix", 1, ["--parallelism.backend=megatron"]),
    "tp_varlen": ("matrix", 2, [*TP, *VARLEN_PER_OP]),
    "sequence_4_varlen": ("matrix", 4, [*SEQUENCE, *TP_4, *VARLEN_PER_OP]),
    "sequence_inductor": ("matrix", 4, [*SEQUENCE, *FSDP, *INDUCTOR]),
}

VALIDATION = ["--validation.freq=2", "--validation.samples=10", "--validation.batch_size=4"]
VALIDATION += ["--validation.times=0.9,0.3", "--ema.decays=0.1,0.9"]
# Three prompts on two or four ranks: one of them has more than another, or none.
SAMPLES = ["--samples.freq=4", "--samples.count=3", "--samples.speaker_scorer=resemblyzer"]
SAMPLES += ["--sampling.steps=2", "--sampling.codec=mel_dct"]
SAMPLED = ("ddp", "fsdp", "hsdp", "tp", "sequence_inductor")

PACKED = ["--data.batching=packed", "--data.longest_per_row=2"]
CAPTIONS = ["--data.max_caption_tokens=12", "--objective.caption_dropout=0.3"]
CAPTIONS += ["--objective.speaker_dropout=0.5"]
VARIANTS = {
    "captions": ("", 2, CAPTIONS, FSDP),
    "captions_tp_compile": ("matrix", 2, CAPTIONS, [*TP, *TRACED, *PER_OP]),
    "packed": (
        "slow",
        2,
        [*PACKED, *CAPTIONS],
        [*DDP, "--training.local_batch_size=2", *WHOLE, *PER_OP],
    ),
    "packed_hsdp": ("matrix", 4, PACKED, [*HSDP, *WHOLE, FULL]),
    "packed_tp_fsdp": ("matrix", 4, PACKED, [*TP, *FSDP, *TRACED, *PER_OP]),
    "8bit": ("matrix", 2, ["--optimizer.state_dtype=8bit"], FSDP),
    "8bit_tp_fsdp": ("matrix", 4, ["--optimizer.state_dtype=8bit"], [*TP, *FSDP]),
    "muon_tp": ("matrix", 2, ["--optimizer.name=Muon"], TP),
    "muon_base_dim": ("slow", 2, ["--optimizer.name=Muon", "--optimizer.base_dim=512"], FSDP),
    "drawn_references": (
        "slow",
        2,
        ["--data.references=drawn"],
        [*DDP, "--training.local_batch_size=2"],
    ),
}


def selected(table: dict[str, tuple]) -> list:
    """The table's names with their marks."""
    return [
        pytest.param(name, marks=[getattr(pytest.mark, mark)] if mark else [])
        for name, (mark, *_) in table.items()
    ]


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """Data, a seed checkpoint, and the losses of the plain run that starts from it."""
    folder = tmp_path_factory.mktemp("parity")
    make_shards(folder / "data/train", 40, seed=3)
    make_shards(folder / "data/heldout", 13, seed=4)
    common = [*runs.TINY, "--data.path", str(folder / "data/train"), f"--training.steps={STEPS}"]
    common += ["--model.text_positions=aligned", *VALIDATION]
    runs.run(folder, "seed", [*common, "--checkpoint.create_seed_checkpoint"])
    seed_checkpoint = folder / "seed" / "checkpoint" / "step-0"
    common += ["--checkpoint.load_only", "--checkpoint.initial_load_path", str(seed_checkpoint)]
    plain = runs.run(folder, "plain", [*common, *SAMPLES]).metrics()
    assert sorted(plain) == list(range(1, STEPS + 1))
    return folder, common, plain


def assert_same(metrics: dict[int, dict], expected: dict[int, dict]) -> None:
    for step, row in expected.items():
        assert metrics[step]["loss"] == pytest.approx(row["loss"], abs=1e-5)
        assert metrics[step]["grad_norm"] == pytest.approx(row["grad_norm"], abs=1e-5)
    # The losses must have moved, or equality would say nothing of the optimizer.
    assert abs(expected[STEPS]["loss"] - expected[1]["loss"]) > 1e-4


def measured(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    return [row for row in rows if "heldout_loss" in row]


def assert_same_validation(run: Path, expected: Path) -> None:
    found, wanted = measured(run), measured(expected)
    assert [row["step"] for row in found] == [2, 4]
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        figures = [name for name, value in other.items() if isinstance(value, float)]
        figures = [name for name in figures if name not in ("time", "seconds")]
        assert len(figures) > 20
        assert row["best_weights"] == other["best_weights"]
        for name in figures:
            assert row[name] == pytest.approx(other[name], abs=1e-6), name
    last = wanted[-1]
    names = ("heldout_loss_raw", "heldout_loss_ema:0.1", "heldout_loss_ema:0.9")
    assert len({round(last[name], 5) for name in names}) == 3  # each with weights of its own


def assert_same_samples(run: Path, expected: Path) -> None:
    folders = [each / "step-4" for each in (run, expected)]
    report, wanted = (json.loads((each / "scores.json").read_text()) for each in folders)
    assert len(report["prompts"]) == len(wanted["prompts"]) == 3
    similarity = pytest.approx(wanted["speaker_similarity"], abs=1e-4)
    assert report["speaker_similarity"] == similarity
    for prompt in wanted["prompts"]:
        sounds = [soundfile.read(each / f"{prompt['name']}.wav")[0] for each in folders]
        assert np.abs(sounds[1]).max() > 0.01
        np.testing.assert_allclose(*sounds, atol=2e-2)
        assert (folders[0] / f"{prompt['name']}.png").stat().st_size > 1000


@pytest.mark.parametrize("layout", selected(LAYOUTS))
def test_layout_trains_as_one_process_does(seeded, layout):
    folder, common, plain = seeded
    _, processes, arguments = LAYOUTS[layout]
    # One of them as a user starts it.
    launcher = layout == "accumulation"
    samples = SAMPLES if layout in SAMPLED else []
    run = runs.run(folder, layout, [*common, *arguments, *samples], processes, launcher)
    assert_same(run.metrics(), plain)
    assert_same_validation(folder / layout, folder / "plain")
    if samples:
        assert_same_samples(folder / layout / "samples", folder / "plain/samples")


@pytest.mark.parametrize("variant", selected(VARIANTS))
def test_variant_trains_on_ranks_as_in_one_process(seeded, variant):
    folder, common, plain = seeded
    _, processes, arguments, layout = VARIANTS[variant]
    common = [*common, *arguments]
    alone = runs.run(folder, variant, common).metrics()
    sharded = runs.run(folder, f"{variant}_sharded", [*common, *layout], processes)
    assert_same(sharded.metrics(), alone)
    assert_same_validation(sharded.folder, folder / variant)
    # It acts: the plain run is another.
    assert abs(alone[STEPS]["loss"] - plain[STEPS]["loss"]) > 1e-7


@pytest.mark.matrix
def test_tensor_parallelism_in_bfloat16_is_as_near_as_one_process_in_bfloat16(seeded):
    """Autocast rounds at other places than one process does, so the distance is compared, not the values."""
    folder, common, plain = seeded
    common = [*common, "--training.mixed_precision_param=bfloat16"]
    alone = runs.run(folder, "bf16", common).metrics()
    for name, layout, processes in (("tp", TP, 2), ("tp_fsdp", [*TP, *FSDP], 4)):
        found = runs.run(folder, f"bf16_{name}", [*common, *layout], processes).metrics()
        for step, row in plain.items():
            distance = abs(alone[step]["loss"] - row["loss"])
            assert abs(found[step]["loss"] - row["loss"]) < 3 * max(distance, 1e-4), (name, step)
            assert found[step]["grad_norm"] == pytest.approx(row["grad_norm"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["ddp_accumulation", pytest.param("hsdp", marks=pytest.mark.matrix)]
)
def test_the_duration_predictor_trains_on_ranks_as_in_one_process(seeded, layout):
    folder, _, _ = seeded
    data = ["--data.path", str(folder / "data/train"), f"--training.steps={STEPS}"]
    common = [*runs.TINY, *data, *VALIDATION, "--model.flavor=duration"]
    common += ["--objective.text_dropout=0", "--activation_checkpoint.mode=none"]
    common += ["--model.text_positions=none"]
    alone = runs.run(folder, f"lengths_before_{layout}", common)
    _, processes, arguments = LAYOUTS[layout]
    name = f"lengths_{layout}"
    run = runs.run(folder, name, [*common, *arguments], processes)
    assert_same(run.metrics(), alone.metrics())
    assert_same_validation(folder / name, alone.folder)
