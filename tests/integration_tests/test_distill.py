"""`titan-tts train distill`: from a run to a student that speaks in few steps, on one process and on ranks."""

import json
import tomllib

import pytest
import soundfile

from tools.harness import runs
from tools.harness.forked import titan_tts
from tools.harness.synthetic import make_shards

FSDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]
DDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_replicate_degree=2"]
TP = ["--parallelism.backend=megatron", "--parallelism.tensor_parallel_degree=2"]
# One graph per shape and kind of block, and as many without gradients.
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
STUDENT = ["--sampling.steps=4", "--sampling.text_scale=0", "--distill.teacher_steps=2"]
STUDENT += ["--optimizer.lr=0.01", "--training.steps=3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    make_shards(folder / "data/train", 24)
    make_shards(folder / "data/heldout", 6, seed=4)
    more = [f"--data.path={folder / 'data/train'}", "--training.steps=3", "--optimizer.lr=0.01"]
    more += ["--validation.no-enable", "--ema.decays=0.5", "--sampling.text_scale=2"]
    return runs.run(folder, "base", [*runs.TINY, *more], 1).folder


def run_command(*arguments):
    done = titan_tts(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_from_a_run_to_speech_in_four_steps(base, tmp_path):
    own = [f"--data.path={base.parent / 'data/train'}", f"--job.dump_folder={tmp_path}"]
    own += ["--training.steps=2", "--validation.samples=4", "--distill.teacher_steps=2"]
    own += ["--data.max_dropped_fraction=1", "--checkpoint.interval=2"]
    run_command("export", base, teacher := tmp_path / "teacher")
    run_command("train", "distill", f"--distill.teacher={teacher}", *own)
    run = tmp_path / "distill"
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["distill"]["passes"] == 2 * 2  # with guidance by the text
    assert config["validation"]["times"] == [1.0, 0.75, 0.5, 0.25]
    run_command(
        "train", "distill", f"--distill.teacher={teacher}", *own
    )  # complete: nothing is left
    student = tmp_path / "student"
    run_command("export", run, student)
    sampling = json.loads((student / "config.json").read_text())["config"]["sampling"]
    assert (sampling["steps"], sampling["text_scale"]) == (4, 0.0)
    out = tmp_path / "speech.wav"
    run_command("generate", student, "--text=a b", "--seconds=0.4", f"--out={out}")
    assert soundfile.info(out).frames == 6400


@pytest.fixture(scope="module")
def alone(base):
    """What runs of a student have in common, and the one of one process."""
    run_command("export", base, exported := base.parent / "exported")
    common = [*runs.TINY, *STUDENT, f"--distill.teacher={exported}", "--validation.freq=3"]
    common += [f"--data.path={base.parent / 'data/train'}", "--validation.batch_size=3"]
    return common, runs.run(base.parent, "alone", common)


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
