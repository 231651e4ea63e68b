"""What runs in eager mode is what a compiler gets, with its gradients."""

import pytest
import torch

from tests.helpers.small_models import full_inputs, random_model, small_args
from torchtitan.models.dit_tts.model import cpu_kernels
from torchtitan.models.dit_tts.model.layers import rope_table

ARGS = small_args(
    n_heads=3,
    dim=24,
    mlp_dim=30,
    speaker_dim=16,
    speaker_mlp_dim=24,
    latent_channels=8,
    text_vocab_size=10,
    text_positions="aligned",
)


def outcome(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    out = model(**inputs)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out * weights).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_the_model_computes_the_same_in_eager_mode(dtype, tolerance, monkeypatch):
    torch.manual_seed(0)
    model = random_model(ARGS).to(dtype)
    inputs = full_inputs(ARGS, rows=2, frames=9, text=5, speaker=6)
    inputs["text_ids"] = torch.arange(10).view(2, 5)
    found = outcome(model, inputs)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(cpu_kernels.Function, "apply", None)  # none of them is used
    for own, expected in zip(found, outcome(model, inputs), strict=True):
        largest = float(expected.abs().max())
        assert largest > 1e-5
        torch.testing.assert_close(own, expected, rtol=0, atol=tolerance * largest)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).double()


def rope(positions: torch.Tensor) -> torch.Tensor:
    return rope_table(positions.float(), 4, 10.0, (True, False)).double()


PER_SAMPLE, ONE_EACH = (normal(2, 1, 4), normal(2, 1, 4)), torch.tensor([0, 1, 2])
FUSED = (normal(2, 3, 4, 2, 4), normal(4, 1, 4))


@pytest.mark.parametrize(
    "function, inputs",
    [
        (cpu_kernels.scaled_norm, (normal(2, 3, 4), normal(2, 1, 4), normal(2, 1, 4), 1e-3)),
        (cpu_kernels.scaled_norm, (normal(2, 3, 4), normal(4), None, 1e-3)),
        # One position: sums and products have the shape of what they are made of.
        (cpu_kernels.scaled_norm, (normal(2, 1, 4), normal(2, 1, 4), normal(2, 1, 4), 1e-3)),
        (cpu_kernels.scaled_norm, (normal(1, 4), normal(1, 4), None, 1e-3)),
        (cpu_kernels.scaled_norm, (normal(1, 2, 4), *PER_SAMPLE, 1e-3, ONE_EACH)),
        (cpu_kernels.normed_heads, (normal(1, 1, 2, 4, 4), normal(2, 2, 4), None, 1e-3)),
        (cpu_kernels.silu_mul, (normal(1, 1, 2, 4),)),
        (cpu_kernels.sigmoid_mul, (normal(1, 1, 4), normal(1, 1, 2, 4)[..., 0, :])),
        (cpu_kernels.add_scaled, (normal(2, 1, 4), normal(2, 1, 4), normal(2, 1, 4))),
        (cpu_kernels.add_scaled, (normal(1, 2, 4), PER_SAMPLE[0], normal(1, 2, 4), ONE_EACH)),
        (cpu_kernels.normed_heads, (normal(2, 3, 2, 4, 4), normal(2, 2, 4), None, 1e-3)),
        (cpu_kernels.normed_heads, (*FUSED, rope(torch.arange(3)), 1e-3)),
        (cpu_kernels.normed_heads, (*FUSED, rope(normal(2, 3)), 1e-3)),
        (cpu_kernels.silu_mul, (normal(2, 3, 2, 4),)),
        (cpu_kernels.sigmoid_mul, (normal(2, 3, 4), normal(2, 3, 2, 4)[..., 0, :])),
        (cpu_kernels.add_scaled, (normal(2, 3, 4), normal(2, 1, 4), normal(2, 3, 4))),
    ],
)
def test_backward_passes(function, inputs):
    for each in inputs:
        differs = isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim() < 5
        if differs or each is inputs[0]:
            each.requires_grad_()
    with torch.enable_grad():
        assert torch.autograd.gradcheck(function, inputs)


def test_one_row_is_left_as_it_was():
    """Its parts are contiguous already, so nothing may be computed in place of them."""
    x, fused, gate = normal(1, 1, 2, 4).float(), normal(1, 1, 1, 2, 4).float(), normal(1, 4).float()
    before = [each.clone() for each in (x, fused, gate)]
    cpu_kernels.silu_mul(x)
    cpu_kernels.normed_heads(fused, torch.ones(1, 1, 4), None, 1e-6)
    cpu_kernels.sigmoid_mul(gate, gate)
    assert all(map(torch.equal, (x, fused, gate), before))


def test_bfloat16_is_computed_in_float32():
    x = normal(64, 256).bfloat16()
    scale, shift = normal(256).bfloat16(), normal(1, 256).bfloat16()
    found = cpu_kernels.scaled_norm(x, scale, shift, 1e-6)
    expected = cpu_kernels.scaled_norm(x.double(), scale.double(), shift.double(), 1e-6)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()
