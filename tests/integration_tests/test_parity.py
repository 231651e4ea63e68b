"""The same training on every layout: losses and gradient norms agree within 1e-5."""

import pytest

from tools.harness import runs
from tools.harness.synthetic import make_shards

STEPS = 4

FSDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]
DDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_replicate_degree=2"]
HSDP = [*DDP, "--training.local_batch_size=2", "--parallelism.data_parallel_shard_degree=2"]

# The decoder's blocks; the cases "compile" and "inductor" have the encoders' too.
INDUCTOR = ["--compile.enable", "--compile.components", "model"]
# Traces, partitions and runs the graphs; Inductor's kernels take minutes to compile.
TRACED = [*INDUCTOR, "--compile.backend=aot_eager"]

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
    "full_checkpointing": (1, ["--activation_checkpoint.mode=full"]),
    "every_2nd_block": (1, [SELECTIVE, "--activation_checkpoint.selective_ac_option=2"]),
    "per_op_checkpointing": (1, PER_OP),
    "compile": (1, ["--compile.enable", "--compile.backend=aot_eager"]),
    "fsdp_compile_checkpointing": (2, [*FSDP, *TRACED, "--activation_checkpoint.mode=full"]),
    "fsdp_memory_budget": (2, [*FSDP, *TRACED, "--activation_checkpoint.mode=memory_budget"]),
    "hsdp_varlen_per_op": (4, [*HSDP, *TRACED, *VARLEN_PER_OP]),
    "ddp_flex_compile": (2, [*DDP, *TRACED, "--attention.backend=flex"]),
}

# The same with kernels by Inductor, which are also others than eager's.
SLOW_LAYOUTS = {
    "inductor": (1, ["--compile.enable"]),
    "fsdp_inductor_checkpointing": (2, [*FSDP, *INDUCTOR, "--activation_checkpoint.mode=full"]),
    "fsdp_inductor_memory_budget": (
        2,
        [*FSDP, *INDUCTOR, "--activation_checkpoint.mode=memory_budget"],
    ),
    "hsdp_inductor_tuned_varlen_per_op": (
        4,
        [*HSDP, *INDUCTOR, *VARLEN_PER_OP, "--compile.mode=max-autotune-no-cudagraphs"],
    ),
    "ddp_inductor_flex": (2, [*DDP, *INDUCTOR, "--attention.backend=flex"]),
}

OPTIMIZERS = {
    "bfloat16": (2, ["--optimizer.state_dtype=bfloat16"], FSDP),
    "8bit": (2, ["--optimizer.state_dtype=8bit"], FSDP),
    "muon": (2, ["--optimizer.name=Muon"], FSDP),
}


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """Data, a seed checkpoint, and the losses of the plain run that starts from it."""
    folder = tmp_path_factory.mktemp("parity")
    make_shards(folder / "data", 40, seed=3)
    common = [*runs.TINY, "--data.path", str(folder / "data"), f"--training.steps={STEPS}"]
    runs.run(folder, "seed", [*common, "--checkpoint.create_seed_checkpoint"])
    seed_checkpoint = folder / "seed" / "checkpoint" / "step-0"
    common += ["--checkpoint.load_only", "--checkpoint.initial_load_path", str(seed_checkpoint)]
    plain = runs.run(folder, "plain", common).metrics()
    assert sorted(plain) == list(range(1, STEPS + 1))
    return folder, common, plain


def assert_same(metrics: dict[int, dict], expected: dict[int, dict]) -> None:
    for step, row in expected.items():
        assert metrics[step]["loss"] == pytest.approx(row["loss"], abs=1e-5)
        assert metrics[step]["grad_norm"] == pytest.approx(row["grad_norm"], abs=1e-5)
    # The losses must have moved, or equality would say nothing of the optimizer.
    assert abs(expected[STEPS]["loss"] - expected[1]["loss"]) > 1e-4


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW_LAYOUTS)]
)
def test_layout_trains_as_one_process_does(seeded, layout):
    folder, common, plain = seeded
    processes, arguments = {**LAYOUTS, **SLOW_LAYOUTS}[layout]
    # One of them as a user starts it.
    launcher = layout == "accumulation"
    run = runs.run(folder, layout, [*common, *arguments], processes, launcher)
    assert_same(run.metrics(), plain)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_trains_on_shards_as_in_one_process(seeded, optimizer):
    folder, common, plain = seeded
    processes, arguments, layout = OPTIMIZERS[optimizer]
    common = [*common, *arguments]
    alone = runs.run(folder, optimizer, common).metrics()
    sharded = runs.run(folder, f"{optimizer}_sharded", [*common, *layout], processes)
    assert_same(sharded.metrics(), alone)
    # Another optimizer than the plain run's.
    assert abs(alone[STEPS]["loss"] - plain[STEPS]["loss"]) > 1e-7
