"""Students of a run on ranks."""

import json

import pytest

from tools.harness import runs
from tools.harness.forked import titan_tts
from tools.harness.synthetic import make_shards

FSDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]
DDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_replicate_degree=2"]
TP = ["--parallelism.backend=megatron", "--parallelism.tensor_parallel_degree=2"]
# One graph per shape and kind of block, and as many without gradients.
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
STUDENT = ["--sampling.steps=4", "--sampling.text_scale=0", "--distill.teacher_steps=2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The common settings of a student's runs, and its run in one process."""
    folder = tmp_path_factory.mktemp("distill")
    make_shards(folder / "data/train", 24)
    make_shards(folder / "data/heldout", 6, seed=4)
    common = [*runs.TINY, f"--data.path={folder / 'data/train'}", "--training.steps=3"]
    common += ["--optimizer.lr=0.01"]
    more = ["--validation.no-enable", "--ema.decays=0.5", "--sampling.text_scale=2"]
    base = runs.run(folder, "base", [*common, *more], 1).folder
    done = titan_tts("export", base, exported := folder / "exported")
    assert done.returncode == 0, done.stdout + done.stderr
    common += [*STUDENT, f"--distill.teacher={exported}"]
    common += ["--validation.freq=3", "--validation.batch_size=3"]
    return common, runs.run(folder, "alone", common)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout",
    [("fsdp", FSDP), ("ddp_compiled", [*DDP, *COMPILED]), ("tp", TP)],
)
def test_ranks_learn_what_one_process_learns(alone, tmp_path, name, layout):
    common, alone = alone
    ranks = runs.run(tmp_path, name, [*common, *layout], 2)
    wanted, found = alone.metrics(), ranks.metrics()
    assert wanted[1]["loss"] > 1e-4 and abs(wanted[3]["loss"] - wanted[1]["loss"]) > 1e-6
    for step, row in wanted.items():
        assert found[step]["loss"] == pytest.approx(row["loss"], abs=1e-5)
        assert found[step]["grad_norm"] == pytest.approx(row["grad_norm"], abs=1e-5)
    measured = [json.loads((run.folder / "validation.jsonl").read_text()) for run in (alone, ranks)]
    assert measured[1]["heldout_loss"] == pytest.approx(measured[0]["heldout_loss"], abs=1e-6)
    log = ranks.log.read_text()
    assert "set TORCH_LOGS=recompiles" not in log and "Set timeout" not in log
