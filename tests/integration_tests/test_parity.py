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

LAYOUTS = {
    "accumulation": (1, ["--training.local_batch_size=4"]),
    "ddp": (2, DDP),
    "fsdp": (2, FSDP),
    "hsdp": (4, HSDP),
    "ddp_accumulation": (2, [*DDP, "--training.local_batch_size=2"]),
    "hsdp_accumulation": (4, [*HSDP, "--training.local_batch_size=1"]),
    # Weights that stay gathered over two micro-batches.
    "fsdp_never": (2, [*FSDP, "--training.local_batch_size=2", NEVER]),
    "full_checkpointing": (1, [FULL]),
    "every_2nd_block": (1, [SELECTIVE, "--activation_checkpoint.selective_ac_option=2"]),
    "per_op_checkpointing": (1, PER_OP),
    "compile": (1, WHOLE),
    "fsdp_compile_checkpointing": (2, [*FSDP, *TRACED, FULL]),
    "fsdp_memory_budget": (2, [*FSDP, *TRACED, BUDGET]),
    "hsdp_varlen_per_op": (4, [*HSDP, *TRACED, *VARLEN_PER_OP]),
    "tp": (2, TP),
}

# Tested in parts by other layouts, or by tests of the layers.
COVERED = ("ddp_accumulation", "hsdp_accumulation", "every_2nd_block", "fsdp_memory_budget")
COVERED += ("hsdp_varlen_per_op", "full_checkpointing", "per_op_checkpointing")
LONG = ("hsdp", "tp", "fsdp_never", "fsdp_compile_checkpointing")
MATRIX_LAYOUTS = {
    "ddp_inductor": (2, [*DDP, *INDUCTOR]),
    "tp_fsdp_compile_per_op": (4, [*TP, *FSDP, *TRACED, *PER_OP]),
    "inductor": (1, ["--compile.enable"]),
    "fsdp_inductor_memory_budget": (2, [*FSDP, *INDUCTOR, BUDGET]),
    "hsdp_inductor_tuned_varlen_per_op": (4, [*HSDP, *INDUCTOR, *VARLEN_PER_OP, TUNED]),
    "hsdp_compile": (4, [*HSDP, *TRACED, FULL]),
    "tp_4": (4, [*TP_4, FULL]),
    "tp_1": (1, ["--parallelism.backend=megatron"]),
    "tp_ddp": (4, [*TP, *DDP]),
    "tp_varlen": (2, [*TP, *VARLEN_PER_OP]),
    "sequence": (2, [*SEQUENCE, *TRACED, *PER_OP]),
    "sequence_4_varlen": (4, [*SEQUENCE, *TP_4, *VARLEN_PER_OP]),
    "sequence_inductor": (4, [*SEQUENCE, *FSDP, *INDUCTOR]),
    "tp_compile": (2, [*TP, *TRACED]),
}

# With kernels by Inductor, which are also others than eager's.
SLOW_LAYOUTS = {"fsdp_inductor_checkpointing": (2, [*FSDP, *INDUCTOR, FULL])}

VALIDATION = ["--validation.freq=2", "--validation.samples=10", "--validation.batch_size=4"]
VALIDATION += ["--validation.times=0.9,0.3", "--ema.decays=0.1,0.9"]
# Three prompts on two or four ranks: one of them has more than another, or none.
SAMPLES = ["--samples.freq=4", "--samples.count=3", "--samples.speaker_scorer=resemblyzer"]
SAMPLES += ["--sampling.steps=2", "--sampling.codec=mel_dct"]
SAMPLED = ("ddp", "fsdp", "hsdp", "tp", "sequence")

PACKED = ["--data.batching=packed", "--data.longest_per_row=2"]
VARIANTS = {
    "packed": (
        2,
        PACKED,
        [*DDP, "--training.local_batch_size=2", *WHOLE, *PER_OP],
    ),
    "packed_hsdp": (4, PACKED, [*HSDP, *WHOLE, FULL]),
    "packed_tp_fsdp": (4, PACKED, [*TP, *FSDP, *TRACED, *PER_OP]),
    "8bit": (2, ["--optimizer.state_dtype=8bit"], FSDP),
    "8bit_tp": (2, ["--optimizer.state_dtype=8bit"], TP),
    "8bit_tp_fsdp": (4, ["--optimizer.state_dtype=8bit"], [*TP, *FSDP]),
    "muon_tp": (2, ["--optimizer.name=Muon"], TP),
    "muon_base_dim": (2, ["--optimizer.name=Muon", "--optimizer.base_dim=16"], FSDP),
    "drawn_references": (2, ["--data.references=drawn"], [*DDP, "--training.local_batch_size=2"]),
}
SLOW_VARIANTS = ("packed", "muon_base_dim", "drawn_references")


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


@pytest.mark.parametrize(
    "layout",
    [
        *(each for each in LAYOUTS if each not in (*COVERED, *LONG)),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (*LONG, *SLOW_LAYOUTS)),
        *(pytest.param(each, marks=pytest.mark.matrix) for each in (*COVERED, *MATRIX_LAYOUTS)),
    ],
)
def test_layout_trains_as_one_process_does(seeded, layout):
    folder, common, plain = seeded
    processes, arguments = {**LAYOUTS, **SLOW_LAYOUTS, **MATRIX_LAYOUTS}[layout]
    # One of them as a user starts it.
    launcher = layout == "accumulation"
    samples = SAMPLES if layout in SAMPLED else []
    run = runs.run(folder, layout, [*common, *arguments, *samples], processes, launcher)
    assert_same(run.metrics(), plain)
    assert_same_validation(folder / layout, folder / "plain")
    if samples:
        assert_same_samples(folder / layout / "samples", folder / "plain/samples")


@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param(v, marks=pytest.mark.slow) for v in SLOW_VARIANTS),
        *(pytest.param(v, marks=pytest.mark.matrix) for v in VARIANTS if v not in SLOW_VARIANTS),
    ],
)
def test_variant_trains_on_ranks_as_in_one_process(seeded, variant):
    folder, common, plain = seeded
    processes, arguments, layout = VARIANTS[variant]
    common = [*common, *arguments]
    alone = runs.run(folder, variant, common).metrics()
    sharded = runs.run(folder, f"{variant}_sharded", [*common, *layout], processes)
    assert_same(sharded.metrics(), alone)
    assert_same_validation(sharded.folder, folder / variant)
    # It acts: the plain run is another.
    assert abs(alone[STEPS]["loss"] - plain[STEPS]["loss"]) > 1e-7


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [(2, TP), (4, [*TP, *FSDP])], ids=["tp", "tp_fsdp"])
def test_states_of_few_bits_resume_on_the_layout_that_wrote_them(tmp_path, layout):
    make_shards(tmp_path / "data", 40, seed=3)
    common = [*runs.TINY, f"--data.path={tmp_path / 'data'}", "--lr_scheduler.decay_ratio=0"]
    common += [*layout[1], "--optimizer.state_dtype=8bit"]
    whole = runs.run(tmp_path, "whole", [*common, f"--training.steps={STEPS}"], layout[0])
    runs.run(tmp_path, "halves", [*common, "--training.steps=2"], layout[0])
    halves = runs.run(tmp_path, "halves", [*common, f"--training.steps={STEPS}"], layout[0])
    found, wanted = ([row["loss"] for row in run.metrics().values()] for run in (halves, whole))
    assert found == wanted and len(wanted) == STEPS


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
    processes, arguments = LAYOUTS[layout]
    name = f"lengths_{layout}"
    run = runs.run(folder, name, [*common, *arguments], processes)
    assert_same(run.metrics(), alone.metrics())
    assert_same_validation(folder / name, alone.folder)
