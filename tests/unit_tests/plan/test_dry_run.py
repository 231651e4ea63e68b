"""--dry-run: what it predicts is what real tensors take, and it starts and writes nothing."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import parallel_dims

from tests.helpers.pretrained_checkpoints import write_tiny_t5, write_tiny_t5gemma2
from torchtitan.models.dit_tts import get_train_spec, model_flavors
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.objective import squared_error_sum
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.main import train
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan.activations import activation_memory, measure
from torchtitan.models.dit_tts.plan.downloads import downloads
from torchtitan.models.dit_tts.plan.dry_run import DryRunOptions, take_options
from torchtitan.models.dit_tts.plan.parameters import (
    build_on_meta,
    count_parameters,
    frozen_total,
    model_sizes,
    trained_total,
)
from torchtitan.models.dit_tts.plan.plan import make_plan, planned_gpus
from torchtitan.models.dit_tts.plan.report import memory_lines, report
from torchtitan.models.dit_tts.plan.states import (
    DataParallelLayout,
    fake_process_group,
    state_memory,
)
from torchtitan.models.dit_tts.plan.storage_ledger import StorageLedger
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

pytestmark = pytest.mark.usefixtures("remembered_passes")
ROOT = Path(__file__).resolve().parents[3]
DEBUG = f"--job.config_file={ROOT / 'train_configs/debug.toml'}"
LENGTHS = Lengths(frames=40, text_tokens=24, speaker_frames=16)
SAMPLES = 3
ONE_GIB = 2**30


def debug_config(*arguments: str, **sections: dict):
    config = load_config([DEBUG, *arguments])
    for section, values in sections.items():
        setattr(config, section, replace(getattr(config, section), **values))
    return config


# The command line


@pytest.mark.parametrize(
    "args, expected",
    [
        (["--training.steps=1"], None),
        (["--dry-run", "--training.steps=1"], (["--training.steps=1"], None)),
        (["--dry_run"], ([], None)),
        (["a", "--dry-run-gpus", "8", "b"], (["a", "b"], 8)),
        (["--dry-run-gpus=4", "--dry-run", "--dry-run-gpus=2"], ([], 2)),
    ],
)
def test_flags_are_taken_out(args, expected):
    assert take_options(args) == (expected and DryRunOptions(*expected))


@pytest.mark.parametrize("args", [["--dry-run-gpus"], ["--dry-run-gpus=0"], ["--dry-run-gpus=x"]])
def test_a_number_of_gpus_that_is_none(args):
    with pytest.raises(InputError, match="--dry-run-gpus .* at least 1"):
        take_options(args)


def test_gpus_that_nobody_has_given():
    config = debug_config()
    assert planned_gpus(config)[0] == 4  # 8 do not divide the batch of 12
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.data_parallel_shard_degree = 3
    assert planned_gpus(config) == (6, "the product of the degrees in [parallelism]")
    config = debug_config("--training.global_batch_size=13")
    with pytest.raises(InputError, match="global_batch_size"):
        planned_gpus(config)


# Parameters


@pytest.mark.parametrize("model", ["bytes", "chars", "t5gemma2"])
def test_only_what_data_tell_is_not_counted(model, tmp_path):
    folder = write_tiny_t5gemma2(tmp_path, tokenizer=False) if model == "t5gemma2" else model
    fields = ["speaker", "duration"]
    config = debug_config(encoder={"model": str(folder)}, data={"conditioning": fields})
    sizes = model_sizes(config)
    seconds = config.data.max_frames / config.data.frames_per_second
    known = make_vocabulary(
        "bytes", conditioning=["duration"], duration_token_seconds=0.5, max_seconds=seconds
    )
    rows = 1 + 1 + len(known.conditioning["duration"])  # the unknown tokens and the bins
    count = {
        "bytes": sizes.args.text_vocab_size - 259,
        "chars": sizes.args.text_vocab_size - 4,
        "t5gemma2": sizes.args.condition_ids,
    }[model]
    assert count == rows
    assert any("speaker" in sentence for sentence in sizes.unknown)
    assert any("characters" in sentence for sentence in sizes.unknown) == (model == "chars")


def test_a_number_of_ids_that_is_given_is_taken():
    config = debug_config(encoder={"model": "chars", "vocab_size": 77})
    sizes = model_sizes(config)
    assert sizes.args.text_vocab_size == 77 and sizes.unknown == ()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_pretrained_encoder_is_counted_where_it_belongs(frozen, tmp_path):
    folder = write_tiny_t5gemma2(tmp_path, tokenizer=False)
    config = debug_config(encoder={"model": str(folder), "frozen": frozen})
    sizes = model_sizes(config)
    model = build_on_meta(sizes.args, "float32")
    parts = count_parameters(model, config.encoder, sizes.source)
    own = 243_520
    assert trained_total(parts) == sum(p.numel() for p in model.parameters())
    assert frozen_total(parts) == own * frozen
    [encoder] = [part for part in parts if part.name.startswith("text encoder")]
    assert (encoder.parameters, encoder.trained) == (own, not frozen)


# States


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        DataParallelLayout(1, 1),
        DataParallelLayout(1, 4),
        DataParallelLayout(2, 2),
        DataParallelLayout(4, 1),
    ],
)
def test_state_bytes_are_those_of_real_tensors(layout):
    """One step of the debug model on the first rank of a group whose collectives do nothing."""
    config = debug_config()
    sizes = model_sizes(config)
    predicted = state_memory(config, sizes.args, sizes.source, layout)
    with fake_process_group(layout) as dims:
        model = get_train_spec().model_cls(sizes.args)
        model = get_train_spec().parallelize_fn(model, dims, config)
        optimizers = get_train_spec().build_optimizers_fn([model], config.optimizer, dims)
        ema = EMA(model, 0.9)
        batch = inputs()
        squared_error_sum(model(**batch), batch["latents"], batch["frame_mask"]).backward()
        optimizers.step()
        real = [
            local_bytes(tensors)
            for tensors in (
                model.parameters(),
                (p.grad for p in model.parameters()),
                (
                    value
                    for state in optimizers.optimizers[0].state.values()
                    for value in state.values()
                ),
                ema.shadow.values(),
            )
        ]
    exact = [predicted.weights, predicted.gradients, predicted.optimizer, predicted.ema]
    assert exact[1:] == real[1:]
    # Weights alone have the padding of shards: less than a row of each.
    assert real[0] <= exact[0] <= 1.01 * real[0]


def local_bytes(tensors) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def inputs() -> dict[str, torch.Tensor]:
    frames, text, speaker = LENGTHS.frames, LENGTHS.text_tokens, LENGTHS.speaker_frames
    return {
        "latents": torch.randn(SAMPLES, frames, 128),
        "t": torch.rand(SAMPLES),
        "frame_mask": torch.ones(SAMPLES, frames, dtype=torch.bool),
        "text_ids": torch.randint(3, 259, (SAMPLES, text)),
        "text_mask": torch.ones(SAMPLES, text, dtype=torch.bool),
        "speaker": torch.randn(SAMPLES, speaker, 128),
        "speaker_mask": torch.ones(SAMPLES, speaker, dtype=torch.bool),
        "keep_text": torch.ones(SAMPLES, dtype=torch.bool),
        "keep_speaker": torch.ones(SAMPLES, dtype=torch.bool),
    }


def test_the_machines_own_accelerators_do_not_matter(monkeypatch):
    monkeypatch.setattr(parallel_dims, "device_type", "cuda")
    config = debug_config()
    states = state_memory(config, model_sizes(config).args, None, DataParallelLayout(1, 6))
    assert states.gradients < 4 * 3_855_872 / 5
    assert parallel_dims.device_type == "cuda"


def test_whole_weights_of_each_layout():
    config = debug_config(training={"mixed_precision_param": "bfloat16"})
    sizes = model_sizes(config)
    count = sum(p.numel() for p in build_on_meta(sizes.args, "float32").parameters())
    block = 662_016

    def gathered(layout: DataParallelLayout, **parallelism):
        other = replace(config, parallelism=replace(config.parallelism, **parallelism))
        return state_memory(other, sizes.args, None, layout).gathered

    assert gathered(DataParallelLayout(1, 1)).total == 0
    assert gathered(DataParallelLayout(4, 1)).total == 4 * count  # replicate computes on a copy
    sharded = gathered(DataParallelLayout(1, 4))
    assert sharded.in_turn == 2 * 2 * block
    assert 0 < sharded.kept < 2 * block
    # A block's whole gradient in bfloat16 and, to be reduced, in float32.
    assert (
        state_memory(config, sizes.args, None, DataParallelLayout(1, 4)).gradients_in_turn
        == (2 + 4) * block
    )
    assert gathered(DataParallelLayout(1, 4), fsdp_reshard_after_forward="never").total == 2 * count


@pytest.mark.long
@pytest.mark.parametrize("layout", [DataParallelLayout(1, 2), DataParallelLayout(2, 1)])
def test_a_large_frozen_encoder_is_sharded_where_weights_are(layout, tmp_path):
    folder = write_tiny_t5(tmp_path, tokenizer=False)
    whole = {}
    for limit in (4.0, 0.0):
        encoder = {"model": str(folder), "dtype": "bfloat16", "fsdp_min_gib": limit}
        config = debug_config(encoder=encoder)
        sizes = model_sizes(config)
        states = state_memory(config, sizes.args, sizes.source, layout)
        assert states.encoder_sharded == (layout.sharded and limit == 0)
        whole[limit] = states.encoder
    assert whole[4.0] == 2 * sizes.source.num_parameters()
    assert whole[0.0] == whole[4.0] // layout.shards
    cached = replace(config, encoder=replace(config.encoder, cache_features=True))
    assert state_memory(cached, sizes.args, sizes.source, layout).encoder == 0


# Activations


@pytest.mark.long
@pytest.mark.parametrize(
    "checkpointing, sharded, dtype",
    [
        ("none", True, "bfloat16"),
        ("none", False, "bfloat16"),
        ("full", False, "bfloat16"),
        ("selective", True, "bfloat16"),
    ],
)
def test_fake_tensors_take_what_real_ones_take(checkpointing, sharded, dtype):
    config = debug_config(training={"mixed_precision_param": dtype})
    args = replace(model_sizes(config).args, n_layers=1, speaker_n_layers=1)
    fake, real = (
        measure(config, args, SAMPLES, LENGTHS, checkpointing, sharded=sharded, fake=fake)
        for fake in (True, False)
    )
    assert fake == real
    assert real.saved > 1e6 and real.working > 1e5


@pytest.mark.long
def test_saved_bytes_are_those_that_autograd_saves():
    """Against torch's own hooks, on a real pass of the whole debug model."""
    config = debug_config()
    args = model_sizes(config).args
    model = get_train_spec().model_cls(args)
    batch = inputs()
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *batch.values())}
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = squared_error_sum(model(**batch), batch["latents"].clone(), batch["frame_mask"])
    saved = sum(storage.nbytes() for storage in storages.values())
    predicted = activation_memory(config, args, SAMPLES, LENGTHS, sharded=False)
    # Of the target only the difference to it is saved; the loss itself is alive and not saved.
    assert predicted.saved == saved + loss.nbytes


@pytest.mark.long
@pytest.mark.parametrize("mode, option", [("full", "op"), ("selective", "op"), ("selective", "2")])
def test_blocks_that_are_not_run_are_like_those_that_are(mode, option):
    config = debug_config(activation_checkpoint={"mode": mode, "selective_ac_option": option})
    config.activation_checkpoint.preserve_rng_state = False
    args = replace(model_sizes(config).args, n_layers=4, speaker_n_layers=1)
    predicted = activation_memory(config, args, SAMPLES, LENGTHS, sharded=False)
    with fake_process_group(DataParallelLayout(1, 1)) as dims:
        model = get_train_spec().parallelize_fn(get_train_spec().model_cls(args), dims, config)
    batch, target = inputs(), torch.zeros(SAMPLES, LENGTHS.frames, 128)
    with StorageLedger([*model.parameters(), *batch.values(), target]) as ledger:
        loss = squared_error_sum(model(**batch), target, batch["frame_mask"])
        saved = ledger.alive()
        loss.backward()
        del loss
    assert predicted.saved == saved
    peak = ledger.peak(without=[p.grad for p in model.parameters()])
    # Which blocks are every second one decides whether the most is reached.
    if option == "op":
        assert peak == predicted.saved + predicted.working
    assert peak <= predicted.saved + predicted.working


# Downloads


@pytest.mark.long
def test_what_is_missing_and_what_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    name, codec = "google/t5gemma-2-270m-270m", "facebook/dacvae-watermarked"
    config = debug_config(encoder={"model": name}, sampling={"codec": codec})
    encoder, found = downloads(config, model_sizes(config).source)
    assert (encoder.name, encoder.here, encoder.command) == (name, False, f"hf download {name}")
    assert (found.here, found.size) == (False, "about 0.40 GiB")
    assert found.command == f"hf download {codec} weights.pth"

    snapshot = tmp_path / "hub/models--facebook--dacvae-watermarked/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "weights.pth").write_bytes(b"0" * (ONE_GIB // 64))
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    folder = write_tiny_t5gemma2(tmp_path / "encoder")
    config = debug_config(encoder={"model": str(folder)}, sampling={"codec": codec})
    encoder, found = downloads(config, model_sizes(config).source)
    assert encoder.here and encoder.files == "model.safetensors"
    assert found.here and found.size == "0.02 GiB"
    assert downloads(debug_config(), None) == []


# The whole


@pytest.mark.long
def test_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        DEBUG,
        "--data.path=nowhere",
        "--compile.enable",
        "--activation_checkpoint.mode=full",
    ]
    assert train([*arguments, "--dry-run", "--dry-run-gpus=2"]) == 0
    said = capsys.readouterr().out
    for words in (
        "GPUs: 2 (as --dry-run-gpus says)",
        "FSDP2, replicas x shards = 1 x 2",
        "trained                      3,855,872",
        "activation checkpointing 'full'",
        "titan-tts plan computes how many fewer",
        "2 ranks x 6 samples x 1 accumulation steps = 12 samples",
        "768 frames",
        "12,783,452,160 training FLOPs",
    ):
        assert words in said, said
    assert list(tmp_path.iterdir()) == []
    table = said.split("Memory of one GPU\n")[1].split("not in the sum")[0]
    *sizes, total = map(float, re.findall(r"^  [a-zA-Z -]+ +([0-9.]+) MiB", table, re.MULTILINE))
    assert len(sizes) >= 8 and sum(sizes) == pytest.approx(total, abs=0.01)


@pytest.mark.long
def test_offloaded_states_are_not_the_gpus():
    plan = make_plan(debug_config("--training.enable_cpu_offload"), 2)
    names = {line.what for line in memory_lines(plan)}
    assert not names & {"weights", "gradients", "optimizer", "EMA"}
    assert {"gathered weights", "saved activations"} <= names
    # Weights, gradients, two moments and EMA of one half: 5 x 4 x 3,855,872 / 2 bytes.
    assert any("machine's memory for each GPU: 36.77" in line for line in report(plan, ""))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_every_attention_backend_keeps_the_same(backend):
    """A stand-in on the CPU would keep the scores of all queries and keys."""
    kept = [
        make_plan(
            debug_config("--data.max_frames=64", f"--attention.backend={name}"), 1
        ).activations
        for name in ("sdpa", backend)
    ]
    assert kept[0] == kept[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "options, words",
    [
        ({"state_dtype": "8bit"}, "AdamW: two moments in 8 bits, small parameters' in float32"),
        ({"state_dtype": "bfloat16"}, "AdamW: two moments, bfloat16"),
        ({"name": "Muon"}, "Muon: one moment of the blocks' matrices, two of all else, float32"),
    ],
)
def test_moments_are_named_as_they_are(options, words):
    plan = make_plan(debug_config(optimizer=options, checkpoint={"async_mode": "disabled"}), 1)
    [optimizer] = [line for line in memory_lines(plan) if line.what == "optimizer"]
    assert optimizer.how == words


@pytest.mark.parametrize(
    "argument",
    [
        "--data.num_buckets=9",
        "--training.global_batch_size=13",
        "--model.flavor=2B",
    ],
)
def test_a_mistake_gives_the_runs_sentence(argument, capsys):
    assert train([DEBUG, argument, "--dry-run"]) == 2
    said = capsys.readouterr()
    with pytest.raises(InputError) as caught:
        validate_config(load_config([DEBUG, argument]), 1, list(model_flavors()))
    assert said.err == f"error: {caught.value}\n" and said.out == ""


@pytest.mark.long
def test_the_script_starts_one_process(tmp_path):
    environment = {**os.environ, "NGPU": "2", "NNODES": "2", "PYTHON": sys.executable}
    ended = subprocess.run(
        [ROOT / "scripts/train_tts.sh", "--dry-run", f"--job.dump_folder={tmp_path}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Memory of one GPU") == 1
    assert "GPUs: 4" in ended.stdout and list(tmp_path.iterdir()) == []
