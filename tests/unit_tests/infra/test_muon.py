"""Muon: fused projections are split into their matrices, and each moves as torch's own Muon moves it."""

import pytest
import torch
from torch import nn

from tests.helpers.small_models import initialized_model, small_args
from torchtitan.models.dit_tts.infra.matmul_weights import join_fused, matmul_weights, split_fused
from torchtitan.models.dit_tts.infra.muon import Muon


def test_fused_projections_split_into_their_matrices():
    model = initialized_model(small_args(dim=64, mlp_dim=96, text_vocab_size=20))
    block, products = model.layers[0], matmul_weights(model)
    attention, mlp = block.attention, block.mlp
    layouts = {
        attention.qkv_gate: (4, 4, 16),
        attention.text_kv: (4, 2, 16),
        attention.speaker_kv: (4, 2, 16),
        mlp.gate_and_up: (-1, 2, mlp.block),
    }
    for linear, layout in layouts.items():
        x = torch.randn(3, linear.in_features)
        fused = linear(x).unflatten(-1, layout)
        for part, matrix in enumerate(split_fused(linear.weight, *products[linear])):
            assert torch.allclose(x @ matrix.T, fused[:, :, part].flatten(1), atol=1e-4)
    for linear, (parts, rows) in products.items():
        assert torch.equal(join_fused(split_fused(linear.weight, parts, rows), rows), linear.weight)


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)])
def test_muon_is_torchs_for_each_matrix(shape):
    """Four matrices in one parameter move as four parameters of torch's own Muon do."""
    torch.manual_seed(0)
    apart = [nn.Parameter(torch.randn(shape)) for _ in range(4)]
    fused = nn.Parameter(join_fused(torch.stack([p.detach() for p in apart]), 8))
    mine = Muon({fused: (4, 8)}, lr=0.1, weight_decay=0.2)
    torchs = torch.optim.Muon(apart, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    start = fused.detach().clone()
    for _ in range(3):
        for parameter in apart:
            parameter.grad = torch.randn(shape)
        fused.grad = join_fused(torch.stack([p.grad for p in apart]), 8)
        mine.step()
        torchs.step()
    expected = join_fused(torch.stack([p.detach() for p in apart]), 8)
    # Both iterate in bfloat16.
    assert (fused - expected).norm() < 0.01 * (expected - start).norm()
