"""Bytes of states are those of real tensors, and of units that FSDP2 gathers."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import parallel_dims

from tests.helpers.plan_cases import random_inputs, shipped_debug_config
from tests.helpers.pretrained_checkpoints import write_tiny_t5
from titan_tts.plan.parameters import build_on_meta, model_sizes
from titan_tts.plan.states import DataParallelLayout, fake_process_group, state_memory
from torchtitan.models.dit_tts import get_train_spec
from torchtitan.models.dit_tts.flow.objective import squared_error_sums
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.low_precision_adamw import build_8bit_adamw


@pytest.mark.long
@pytest.mark.parametrize("degrees", [(1, 1), (2, 2), (4, 1), (1, 2, 2)])
def test_state_bytes_are_those_of_real_tensors(degrees):
    """One step of the debug model on the first rank of a group whose collectives do nothing."""
    decays, layout = [0.9, 0.999], DataParallelLayout(*degrees)
    arguments = ["--parallelism.backend=megatron", "--ema.decays=0.9,0.999"]
    config = shipped_debug_config(*arguments)
    sizes = model_sizes(config)
    predicted = state_memory(config, sizes.args, sizes.source, layout)
    with fake_process_group(layout) as dims:
        model = get_train_spec().model_cls(sizes.args)
        model = get_train_spec().parallelize_fn(model, dims, config)
        optimizers = get_train_spec().build_optimizers_fn([model], config.optimizer, dims)
        ema = EMA(model, decays)
        batch = random_inputs()
        errors = squared_error_sums(model(**batch), batch["latents"], batch["frame_mask"])
        errors.sum().backward()
        optimizers.step()
        states, averages = optimizers.optimizers[0].state.values(), ema.averages.values()
        gradients = [p.grad for p in model.parameters()]
        groups = [model.parameters(), gradients]
        groups += [
            [value for each in table for value in each.values()] for table in (states, averages)
        ]
        real = [local_bytes(tensors) for tensors in groups]
    config.ema.enable = False
    assert state_memory(config, sizes.args, sizes.source, layout).ema == 0
    exact = [predicted.weights, predicted.gradients, predicted.optimizer, predicted.ema]
    assert exact[1:] == real[1:]
    # Weights alone have the padding of shards: less than a row of each.
    assert real[0] <= exact[0] <= 1.01 * real[0]


def local_bytes(tensors) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def test_the_machines_own_accelerators_do_not_matter(monkeypatch):
    monkeypatch.setattr(parallel_dims, "device_type", "cuda")
    config = shipped_debug_config()
    states = state_memory(config, model_sizes(config).args, None, DataParallelLayout(1, 6))
    assert states.gradients < 4 * 3_855_872 / 5
    assert parallel_dims.device_type == "cuda"


def test_whole_weights_of_each_layout():
    config = shipped_debug_config(training={"mixed_precision_param": "bfloat16"})
    sizes = model_sizes(config)
    count = sum(p.numel() for p in build_on_meta(sizes.args, "float32").parameters())
    block = 662_016

    def gathered(layout: DataParallelLayout, **parallelism):
        other = replace(config, parallelism=replace(config.parallelism, **parallelism))
        return state_memory(other, sizes.args, None, layout).gathered

    assert gathered(DataParallelLayout(1, 1)).total == 0
    assert gathered(DataParallelLayout(4, 1)).total == 4 * count  # replicate computes on a copy
    sharded = gathered(DataParallelLayout(1, 4))
    assert sharded.transient == 2 * 2 * block
    assert 2 * block < sharded.kept < 4 * block  # the last block, the head and the root
    assert gathered(DataParallelLayout(1, 4), fsdp_prefetch_units=3).transient == 4 * 2 * block
    pairs = gathered(DataParallelLayout(1, 4), fsdp_blocks_per_unit=2)
    assert pairs == replace(sharded, kept=sharded.kept + 2 * block, transient=2 * 2 * 2 * block)
    # A block's whole gradient in bfloat16 and, to be reduced, in float32.
    states = state_memory(config, sizes.args, None, DataParallelLayout(1, 4))
    assert states.unsharded_gradients == (2 + 4) * block
    # Root, text and speaker encoder, four blocks, norm and output.
    head = 192 + 192 * 128 + 128
    assert (states.units, states.first) == (8, (count - 3 * block - head) / count)
    assert gathered(DataParallelLayout(1, 4), fsdp_reshard_after_forward="never").total == 2 * count


@pytest.mark.long
@pytest.mark.parametrize("layout", [DataParallelLayout(1, 2), DataParallelLayout(2, 1)])
def test_a_large_frozen_encoder_is_sharded_where_weights_are(layout, tmp_path):
    folder = write_tiny_t5(tmp_path, tokenizer=False)
    whole = {}
    for limit in (4.0, 0.0):
        encoder = {"model": str(folder), "dtype": "bfloat16", "fsdp_min_gib": limit}
        config = shipped_debug_config(encoder=encoder)
        sizes = model_sizes(config)
        states = state_memory(config, sizes.args, sizes.source, layout)
        assert (states.encoder_units > 0) == (layout.sharded and limit == 0)
        whole[limit] = states.encoder
    assert whole[4.0] == 2 * sizes.source.num_parameters()
    assert whole[0.0] == whole[4.0] // layout.shards
    cached = replace(config, encoder=replace(config.encoder, cache_features=True))
    assert state_memory(cached, sizes.args, sizes.source, layout).encoder == 0


@pytest.mark.long
def test_moments_of_lower_precision():
    """Two bytes each, and for eight bits as torchao has them."""
    config = shipped_debug_config("--optimizer.state_dtype=bfloat16")
    args = model_sizes(config).args
    states = state_memory(config, args, None, DataParallelLayout(1, 1))
    assert states.optimizer == pytest.approx(states.gradients, rel=0.03)
    config = shipped_debug_config("--optimizer.state_dtype=8bit")
    model = get_train_spec().model_cls(args)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_8bit_adamw([{"params": list(model.parameters())}])
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    moments = [value for value in values if hasattr(value, "codes")]
    real = sum(value.nbytes for value in values if not hasattr(value, "codes"))
    real += sum(getattr(m, name).nbytes for m in moments for name in ("codes", "scale", "qmap"))
    states = state_memory(config, args, None, DataParallelLayout(1, 1))
    assert states.optimizer == pytest.approx(real, rel=1e-3)
