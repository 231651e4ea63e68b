"""The layout of what a GPU's kernels read."""

import torch

from torchtitan.models.dit_tts.model.model import LowRankAdaLN


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_modulation_is_read_along_contiguous_channels():
    modulation = LowRankAdaLN(6, 2)(normal(4, 3, 6).float())
    assert modulation.shape == (4, 3, 2, 6) and modulation.stride(-1) == 1
