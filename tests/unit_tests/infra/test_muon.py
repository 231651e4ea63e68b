"""Muon: fused projections are split into their matrices, and each moves as torch's own Muon moves it."""

import pytest
import torch
from torch import nn

from torchtitan.models.dit_tts.infra.matmul_weights import join_fused, split_fused
from torchtitan.models.dit_tts.infra.muon import Muon


def test_rows_of_fused_matrices_stand_in_turns():
    fused = torch.arange(12)[:, None]
    parts = split_fused(fused, 3, 2)
    assert parts[..., 0].tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert torch.equal(join_fused(parts, 2), fused)


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
