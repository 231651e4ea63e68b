"""[lora]: what is trained over a frozen model, and what it adds to the weights."""

import math

import pytest
import torch

from tests.helpers.small_models import full_inputs, initialized_model, random_model, small_args
from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.infra.adapters import add_adapter, is_trained, merge
from torchtitan.models.dit_tts.infra.compile import apply_compile, compiled_graphs
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.model.model import DiTTTSModel

ARGS = small_args(text_vocab_size=8, text_positions="aligned")
RANK, SCALE = 3, 2.0 / 3


def adapted(seed=0):
    model = random_model(ARGS, seed)
    add_adapter(model, Lora(RANK, alpha=2.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_trained(name):
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs():
    torch.manual_seed(1)
    return full_inputs(ARGS, rows=3, frames=6, text=5, speaker=8)


def rows_of(layer_name, number, part):
    """Rows of a fused weight that are one of its matrices', by the layout that model/ documents."""
    if layer_name == "gate_and_up":  # 4 blocks, as many as heads, each of 12 gates and 12 ups
        return [block * 24 + part * 12 + unit for block in range(4) for unit in range(12)]
    # head by head, 8 rows of each
    return [(head * number + part) * 8 + row for head in range(4) for row in range(8)]


@pytest.mark.parametrize(
    "name, number", [("qkv_gate", 4), ("text_kv", 2), ("speaker_kv", 2), ("gate_and_up", 2)]
)
def test_each_fused_matrix_has_an_update_of_its_own(name, number):
    block = adapted().layers[1]
    layer = getattr(block.mlp if name == "gate_and_up" else block.attention, name)
    x = torch.randn(2, 5, layer.in_features)
    found = layer(x)
    for part in range(number):
        rows = rows_of(name, number, part)
        a, b = layer.lora_a[part * RANK : (part + 1) * RANK], layer.lora_b[rows]
        expected = x @ (layer.weight[rows] + SCALE * b @ a).T
        torch.testing.assert_close(found[..., rows], expected)


def test_the_updates_merge_into_the_plain_weights():
    model, plain = adapted(), random_model(ARGS)
    before = plain(**inputs())
    values = {name: p.detach() for name, p in model.named_parameters() if is_trained(name)}
    assert len(values) == 2 * 6 * ARGS.n_layers
    merge(plain, values, SCALE)
    after = plain(**inputs())
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(model(**inputs()), after, atol=1e-5, rtol=0)


def test_only_the_adapter_is_trained_and_averaged():
    model = adapted()
    model(**inputs()).square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if "lora_" in name}
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)
    assert set(EMA(model, [0.9]).averages[0.9]) == trained


def test_an_adapter_starts_as_nothing():
    with torch.device("meta"):
        model = DiTTTSModel(ARGS)
    add_adapter(model, Lora(RANK))
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        model.init_weights()
        model.output.weight.normal_()
        plain = initialized_model(ARGS, seed=5)
        plain.output.weight.copy_(model.output.weight)
    assert torch.equal(model(**inputs()), plain(**inputs()))
    a = model.layers[0].attention.qkv_gate.lora_a
    assert a.std().item() == pytest.approx(1 / math.sqrt(32), rel=0.2)


def test_compiled_blocks_share_one_graph():
    model = adapted()
    expected = model(**inputs())
    torch.compiler.reset()
    apply_compile(model, "aot_eager", 1)
    before = compiled_graphs()
    model(**inputs()).square().sum().backward()
    assert compiled_graphs() - before == 1
    torch.testing.assert_close(model(**inputs()), expected, atol=1e-5, rtol=0)
