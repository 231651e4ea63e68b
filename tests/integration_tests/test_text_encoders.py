"""Frozen and trained text encoders train the same model, on one process and sharded."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from titan_tts.speak.load_run import load_run
from tools.harness import runs
from tools.harness.synthetic import DIGITS, make_samples
from torchtitan.models.dit_tts.data.shard_writer import write_shard

STEPS = 6
FSDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]
DDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_replicate_degree=2"]
TRAINED = ["--encoder.no-frozen"]
UNMOVED = [*TRAINED, "--optimizer.encoder_lr=0"]

TP = ["--parallelism.backend=megatron", "--parallelism.tensor_parallel_degree=2"]
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
CHECKPOINTED = ["--activation_checkpoint.mode=selective"]
CHECKPOINTED += ["--activation_checkpoint.selective_ac_option=op"]
FULL = "--activation_checkpoint.mode=full"


def matrix(*values):
    return pytest.param(*values, marks=pytest.mark.matrix)


WAYS = [
    ("frozen_fsdp", 2, [*FSDP, *COMPILED, "--compile.components", "text_encoder", "loss"]),
    ("trained_fsdp", 2, [*UNMOVED, *FSDP]),
    matrix("trained", 1, UNMOVED),
    matrix("frozen_tp", 2, TP),
]
LAYOUTS = [
    ("ddp", 2, DDP),
    matrix("compiled_per_op", 1, [*COMPILED, *CHECKPOINTED]),
    matrix("tp_compiled_full", 2, [*TP, *COMPILED, FULL]),
    matrix("fsdp_compiled_full", 2, [*FSDP, *COMPILED, FULL]),
    matrix("tp_ddp_full", 4, [*TP, *DDP, FULL]),
    matrix("tp_fsdp_compiled_per_op", 4, [*TP, *FSDP, *COMPILED, *CHECKPOINTED]),
]


def write_talkative_shards(folder):
    """Texts that fill several packed rows of a rank, and these not evenly."""
    folder.mkdir()
    samples = make_samples(40, seed=3)
    generator = np.random.default_rng(0)
    for sample in samples:
        words = generator.choice(DIGITS, size=generator.integers(20, 160))
        sample.metadata["text"] = " ".join(words)
    for shard in range(2):
        write_shard(folder / f"{shard:06d}.tar", samples[shard::2])


def losses(run):
    return [row["loss"] for _, row in sorted(run.metrics().items())]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Data, a tiny T5Gemma2, what all runs have in common, and the run with the frozen encoder."""
    folder = tmp_path_factory.mktemp("encoders")
    write_talkative_shards(folder / "data")
    encoder = write_tiny_t5gemma2(folder / "encoder")
    common = [*runs.TINY, f"--data.path={folder / 'data'}", "--data.max_text_tokens=192"]
    common += ["--data.conditioning=speaker,duration", f"--training.steps={STEPS}"]
    common += ["--encoder.dtype=float32", "--checkpoint.keep_latest_k=0"]
    # Fast, or the text would hardly have come to count: the model starts from a zero output.
    common += ["--optimizer.lr=1e-2", "--lr_scheduler.warmup_steps=0"]
    common += ["--lr_scheduler.decay_ratio=0"]  # so that a run of two steps starts a longer one
    first = ["--checkpoint.enable_first_step_checkpoint"]
    plain = runs.run(folder, "frozen", [*common, f"--encoder.model={encoder}", *first])
    return folder, encoder, common, plain


@pytest.mark.parametrize("way, processes, arguments", WAYS)
def test_every_way_trains_as_the_frozen_encoder_does(prepared, way, processes, arguments):
    folder, encoder, common, plain = prepared
    run = runs.run(folder, way, [*common, f"--encoder.model={encoder}", *arguments], processes)
    assert losses(run) == pytest.approx(losses(plain), abs=1e-5)


def saved(run, step=STEPS):
    metadata = dcp.FileSystemReader(run.folder / "checkpoint" / f"step-{step}").read_metadata()
    return metadata.state_dict_metadata


def weights(run, names, step=STEPS):
    """Trained values of a checkpoint."""
    found = saved(run, step)
    values = {name: torch.empty(found[name].size) for name in names}
    dcp.load(values, checkpoint_id=run.folder / "checkpoint" / f"step-{step}", no_dist=True)
    return values


def test_a_frozen_encoder_is_outside_the_checkpoint_and_its_new_rows_train(prepared):
    folder, encoder, common, plain = prepared
    assert not any("text_encoder" in name for name in saved(plain))
    record = json.loads((plain.folder / "text_encoder.json").read_text())
    assert record["model"] == str(encoder) and len(record["fingerprint"]) == 16
    name = "condition_embedding.weight"
    before, after = (weights(plain, [name], step)[name] for step in (1, STEPS))
    assert (before != after).any(dim=1).float().mean() > 0.3  # rows of values that were drawn


@pytest.fixture(scope="module")
def tuned(prepared):
    """What runs with a trained encoder have in common, and the one of one process."""
    folder, encoder, common, _ = prepared
    common = [*common, f"--encoder.model={encoder}", *TRAINED, "--optimizer.encoder_lr=3e-4"]
    return common, runs.run(folder, "tuned", common)


@pytest.mark.parametrize("layout, processes, arguments", LAYOUTS)
def test_a_trained_encoder_trains_the_same_on_every_layout(
    prepared, tuned, layout, processes, arguments
):
    common, one = tuned
    run = runs.run(prepared[0], f"tuned_{layout}", [*common, *arguments], processes)
    assert losses(run) == pytest.approx(losses(one), abs=1e-5)
    norms = [[row["grad_norm"] for row in each.metrics().values()] for each in (run, one)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-5)


def test_a_trained_encoder_moves_and_resumes(prepared, tuned):
    folder, encoder, _, plain = prepared
    common, one = tuned
    # It has moved what the loss sees, by its own rate.
    assert abs(losses(one)[-1] - losses(plain)[-1]) > 2e-5  # twice what layouts may differ by
    layer = "text_encoder.core.layers.3.mlp.up_proj.weight"
    for kept in (layer, f"ema.decay-0.999.{layer}"):
        assert kept in saved(one)
    assert any(layer in name and name.endswith("exp_avg") for name in saved(one))
    moved = weights(one, [layer])[layer]
    from safetensors.torch import load_file

    stored = load_file(encoder / "model.safetensors")
    names = [name for name in stored if name.endswith("layers.3.mlp.up_proj.weight")]
    [key] = [name for name in names if "encoder" in name and "decoder" not in name]
    change = (moved - stored[key]).abs()
    assert 1e-5 < change.mean() and change.max() < 1.1 * STEPS * 3e-4  # far below the model's

    # In two lives, the second one sharded.
    runs.run(folder, "halves", [*common, "--training.steps=2"])
    second = runs.run(folder, "halves", [*common, *FSDP], 2)
    assert losses(second) == pytest.approx(losses(one), abs=1e-5)


def test_a_trained_run_needs_its_own_folder_only(prepared, tmp_path):
    """To start from a frozen run's weights it needs the encoder; then neither to go on nor to speak."""
    folder, encoder, common, plain = prepared
    own = shutil.copytree(encoder, tmp_path / "encoder")
    arguments = [*common, f"--encoder.model={own}", *TRAINED, "--training.steps=2"]
    started = [f"--checkpoint.initial_load_path={plain.folder / 'checkpoint' / f'step-{STEPS}'}"]
    first = runs.run(folder, "unfrozen", [*arguments, *started])
    assert losses(first)[0] < losses(plain)[0] - 0.3  # on the first batch again, but no new model
    shutil.rmtree(own)
    second = runs.run(folder, "unfrozen", [*arguments, "--training.steps=3"])
    assert len(losses(second)) == 3 and np.isfinite(losses(second)).all()
    run = load_run(second.folder)
    assert all(p.isfinite().all() for p in run.model.text_encoder.parameters())
