"""Forms of the layers that are there for a GPU's compiler."""

import pytest
import torch

from torchtitan.models.dit_tts.model import layers
from torchtitan.models.dit_tts.model.model import LowRankAdaLN


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_modulation_is_read_along_contiguous_channels():
    modulation = LowRankAdaLN(6, 2)(normal(4, 3, 6).float())
    assert modulation.shape == (4, 3, 2, 6) and modulation.stride(-1) == 1


def test_silu_mul_for_triton():
    both = 3 * normal(5, 2, 2, 7)
    gate, up = both[:, :, 0], both[:, :, 1]
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(layers.silu_mul_for_triton(both), expected, rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(layers.silu_mul_for_triton, both.requires_grad_())
    found = layers.silu_mul_for_triton(both.bfloat16())
    assert found.dtype == torch.bfloat16
    gate, up = both.bfloat16().double().unbind(2)
    expected = gate / (1 + (-gate).exp()) * up
    assert ((found - expected).abs() <= expected.abs() * 2**-7).all()  # two roundings


def test_norms_on_a_gpu_are_computed_in_float32(monkeypatch):
    """In bfloat16 only the result is rounded; each weight is its own."""
    monkeypatch.setattr(layers.cpu_kernels, "use_cpu_kernels", lambda x: False)
    x, weight = (30 * normal(3, 2, 6)).bfloat16(), normal(6).bfloat16()
    norm = layers.RMSNorm(6, 0.5).bfloat16()
    norm.weight.data = weight
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.5).sqrt() * weight
    found = norm(x)
    assert found.dtype == torch.bfloat16
    assert ((found - expected).abs() <= expected.abs() * 2**-8 * 1.01).all()  # one rounding


@pytest.mark.parametrize("device, compiling", [("cpu", True), ("meta", False), ("meta", True)])
def test_only_compiled_gpu_code_takes_the_form_for_triton(device, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(layers, "silu_mul_for_triton", lambda both: "for triton")
    found = layers.silu_mul(torch.ones(2, 3, device=device))
    assert isinstance(found, str) == (device != "cpu" and compiling)
