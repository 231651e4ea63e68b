"""The configs of the table of GPUs train on eight ranks with the debug flavor as one process does."""

import pytest

from tools.harness import runs
from tools.harness.synthetic import make_shards

# 32 samples in micro-batches of at most 2: 16 of them on one rank, 2 on eight, and 4 or 8 with tensor parallelism.
TWIN = [
    *("--model.flavor=debug", "--encoder.model=bytes", "--encoder.n_layers=1"),
    *("--data.max_frames=64", "--data.max_speaker_frames=64", "--data.max_text_tokens=40"),
    *("--data.num_buckets=2", "--data.batch_multiple=16", "--data.max_dropped_fraction=1"),
    *("--training.global_batch_size=32", "--training.max_local_batch_size=2"),
    *("--training.steps=2", "--training.mixed_precision_param=float32", "--debug.seed=7"),
    *("--compile.no-enable", "--activation_checkpoint.mode=full", "--optimizer.lr=0.01"),
    *("--lr_scheduler.warmup_steps=1", "--validation.no-enable", "--sampling.codec=mel_dct"),
    *("--metrics.log_freq=1", "--metrics.no-enable-tensorboard", "--data.audit"),
]
HYBRID = "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=4"
# Config: data-parallel ranks of eight, and what its layout has beside.
CASES = {
    "800m": (8, ""),
    "3b": (8, "--parallelism.fsdp_reshard_after_forward=never"),
    "8b": (8, HYBRID),
    "3b_megatron": (4, ""),
    "8b_megatron": (2, "--megatron.sequence_parallel"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Data, weights to start from, and the run of one process."""
    folder = tmp_path_factory.mktemp("scaling")
    make_shards(folder / "train", 80, seed=5)
    common = [*TWIN, "--data.path", str(folder / "train")]
    first = [*config("800m"), *common]
    runs.run(folder, "seed", [*first, "--checkpoint.create_seed_checkpoint"])
    weights = str(folder / "seed/checkpoint/step-0")
    common += ["--checkpoint.load_only", "--checkpoint.initial_load_path", weights]
    return folder, common, runs.run(folder, "alone", [*config("800m"), *common])


def config(name: str) -> list[str]:
    return ["--job.config_file", str(runs.ROOT / f"train_configs/dit_tts_{name}.toml")]


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_the_tiny_twin_trains_on_eight_ranks_as_alone(alone, case):
    folder, common, expected = alone
    ranks, layout = CASES[case]
    found = runs.run(folder, case, [*config(case), *common, *layout.split()], processes=8)
    # Every rank has its part of each batch, as the rule divides it.
    assert found.audited_ids(8) == expected.audited_ids(1) if ranks == 8 else True
    wanted, rows = (
        [(row["step"], row["loss"], row["grad_norm"]) for row in run.metrics().values()]
        for run in (expected, found)
    )
    assert len(rows) == 2 and rows == [pytest.approx(each, abs=1e-5) for each in wanted]
    for run, steps in ((found, 16 // ranks), (expected, 16)):
        assert f"{steps} accumulation steps x 2" in run.log.read_text()
