"""Saved and working bytes of fake passes are those of real ones; compiled blocks save less."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from tests.helpers.plan_cases import (
    LENGTHS,
    SAMPLES,
    debug_config,
    random_inputs,
    shipped_debug_config,
)
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from titan_tts.plan import activations
from titan_tts.plan.activations import StorageLedger, measure
from titan_tts.plan.compiled_block import BlockCompiler, ModelCompiler
from titan_tts.plan.memory import Activations
from titan_tts.plan.parameters import model_sizes
from titan_tts.plan.states import DataParallelLayout, fake_process_group
from torchtitan.models.dit_tts import get_train_spec
from torchtitan.models.dit_tts.flow.objective import squared_error_sums
from torchtitan.models.dit_tts.infra.parallelize import MIN_BUDGET_WITHOUT_MATMULS
from torchtitan.models.dit_tts.model.flops import repeated_flops

pytestmark = pytest.mark.usefixtures("remembered_passes")


def predicted(config, args):
    return Activations(args, LENGTHS, SAMPLES).measured(config, False, SAMPLES, LENGTHS)[0]


@pytest.mark.long
def test_fake_tensors_take_what_real_ones_take():
    config = shipped_debug_config(training={"mixed_precision_param": "bfloat16"})
    args = replace(model_sizes(config).args, n_layers=1, speaker_n_layers=1)
    fake, real = (
        measure(config, args, SAMPLES, LENGTHS, "selective", sharded=True, fake=fake)
        for fake in (True, False)
    )
    assert fake == real
    assert real.saved > 1e6 and real.working > 1e5


@pytest.mark.long
def test_saved_bytes_are_those_that_autograd_saves():
    """Against torch's own hooks, on a real pass of the debug model."""
    config = shipped_debug_config()
    args = model_sizes(config).args
    model = get_train_spec().model_cls(args)
    batch = random_inputs()
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *batch.values())}
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        errors = squared_error_sums(model(**batch), batch["latents"].clone(), batch["frame_mask"])
        loss = errors.sum()
    saved = sum(storage.nbytes() for storage in storages.values())
    memory = predicted(config, args)
    # Of the target only the difference to it is saved; the loss itself is alive and not saved.
    assert memory.saved == saved + loss.nbytes


@pytest.mark.long
def test_blocks_that_are_not_run_are_like_those_that_are():
    checkpointing = {"mode": "selective", "selective_ac_option": "op"}
    config = shipped_debug_config(activation_checkpoint=checkpointing)
    config.activation_checkpoint.preserve_rng_state = False
    args = replace(model_sizes(config).args, n_layers=4, speaker_n_layers=1)
    memory = predicted(config, args)
    with fake_process_group(DataParallelLayout(1, 1)) as dims:
        model = get_train_spec().parallelize_fn(get_train_spec().model_cls(args), dims, config)
    batch, target = random_inputs(), torch.zeros(SAMPLES, LENGTHS.frames, 128)
    with StorageLedger([*model.parameters(), *batch.values(), target]) as ledger:
        loss = squared_error_sums(model(**batch), target, batch["frame_mask"]).sum()
        saved = ledger.alive()
        loss.backward()
        del loss
    assert memory.saved == saved
    peak = ledger.peak(without=[p.grad for p in model.parameters()])
    assert peak == memory.saved + memory.working


def saved_bytes(config, args, lengths, compiled_stacks: str) -> dict[tuple[str, bool], int]:
    """By the kind of checkpointing, and whether these stacks are compiled."""
    saved = {}
    for kind in ("none", "selective", "full"):
        for compiled in (False, True):
            compiler = ModelCompiler(
                [compiled_stacks] * compiled, BlockCompiler(kind == "selective")
            )
            found = measure(config, args, 2, lengths, kind, sharded=True, compiler=compiler)
            saved[kind, compiled] = found.saved
    return saved


@pytest.mark.slow
def test_what_the_compiler_saves():
    config, lengths = debug_config(), replace(LENGTHS, frames=64, text_tokens=40, speaker_frames=64)
    args = replace(model_sizes(config).args, speaker_n_layers=1)
    saved = saved_bytes(config, args, lengths, "model")
    assert saved["none", True] < 0.8 * saved["none", False]
    assert saved["full", True] == saved["full", False]
    assert saved["full", True] < saved["selective", True] < saved["none", True]
    encoders = ModelCompiler(["encoders"])
    found = measure(config, args, 2, lengths, "none", sharded=True, compiler=encoders)
    assert found.saved < saved["none", False]


class CountingLedger(StorageLedger):
    """Counts the FLOPs of the last pass."""

    flops = 0

    def __enter__(self):
        CountingLedger.flops = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            CountingLedger.flops += sdpa_flop_count(*(each.shape for each in args[:3]))
        elif count := flop_registry.get(func.overloadpacket):
            CountingLedger.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


def counted_flops(kind: str, compiled: bool, budget: float = 1.0) -> int:
    """Of a forward and backward pass of two blocks and two samples."""
    config = debug_config()
    args = replace(model_sizes(config).args, n_layers=2, speaker_n_layers=1)
    decoder = BlockCompiler(kind == "selective", budget)
    compiler = ModelCompiler(["model"] * compiled, decoder)
    measure(config, args, 2, LENGTHS, kind, sharded=True, compiler=compiler)
    return CountingLedger.flops


def repeated(kind: str) -> int:
    """By the formula."""
    args = replace(model_sizes(debug_config()).args, n_layers=2, speaker_n_layers=1)
    return 2 * repeated_flops(args, LENGTHS, {kind: 2})


@pytest.mark.long
def test_flops_that_checkpointing_repeats(monkeypatch):
    monkeypatch.setattr(activations, "StorageLedger", CountingLedger)
    without = counted_flops("none", compiled=False)
    for kind in ("full", "selective"):
        assert counted_flops(kind, compiled=False) - without == repeated(kind) > 0


@pytest.mark.slow
def test_flops_that_compiled_blocks_repeat(monkeypatch):
    """But for AdaLN's small matmuls, which the compiler computes in other ways."""
    monkeypatch.setattr(activations, "StorageLedger", CountingLedger)
    without = counted_flops("none", compiled=True)
    slack = 0.01 * without
    found = counted_flops("selective", compiled=True) - without
    assert found == pytest.approx(repeated("selective"), abs=slack) and found > 5 * slack
    budget = MIN_BUDGET_WITHOUT_MATMULS
    for each, limits in ((0.9, (0, slack)), (budget, (0, slack)), (0.0, (5 * slack, without))):
        found = counted_flops("memory_budget", compiled=True, budget=each) - without
        assert limits[0] <= abs(found) <= limits[1], each


@pytest.mark.long
def test_a_trained_text_encoder_saves_less_if_it_is_compiled_or_checkpointed(tmp_path):
    path = write_tiny_t5gemma2(tmp_path / "encoder")
    options = [f"--encoder.model={path}", "--encoder.no-frozen", f"--job.dump_folder={tmp_path}"]
    config = debug_config(*options)
    saved = saved_bytes(config, model_sizes(config).args, LENGTHS, "encoders")
    # Of gate, up, their activation and their product, 128 wide each, six blocks of the text encoder save nothing.
    mlp = 6 * 4 * 128 * 2 * LENGTHS.text_tokens
    assert saved["none", False] - saved["full", False] > mlp * 4
    for compiled in (False, True):
        none, some, full = (saved[kind, compiled] for kind in ("none", "selective", "full"))
        assert 3 * full < some < none / 2
    assert saved["none", True] < 0.9 * saved["none", False]


@pytest.mark.long
def test_sequence_parallelism_keeps_its_part_of_the_frames():
    """Of 65 frames each of two ranks has 33; a checkpointed block keeps its input in bfloat16."""
    config, lengths = debug_config(), replace(LENGTHS, frames=65)
    config.parallelism.tensor_parallel_degree = 2
    args = replace(model_sizes(config).args, speaker_n_layers=1)
    for sequence, frames in ((False, 65), (True, 33)):
        config.megatron.sequence_parallel = sequence
        found = activations.kind_memory(config, args, 3, lengths, "full", True, {})
        assert found.block == 3 * frames * args.dim * 2
