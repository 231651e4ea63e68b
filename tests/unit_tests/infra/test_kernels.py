"""Kernels against the plain definitions of the operations, with their gradients."""

from collections.abc import Callable

import pytest
import torch

from tests.helpers.small_models import small_args
from torchtitan.models.dit_tts.infra.cpu_kernels import CPUKernels
from torchtitan.models.dit_tts.infra.kernels import InductorKernels, build_model, implementation
from torchtitan.models.dit_tts.model.layers import rope_table
from torchtitan.models.dit_tts.model.operations import Operations, WithOperations


def test_a_built_model_computes_by_them():
    model = build_model(small_args(text_vocab_size=10))
    choosing = [each for each in model.modules() if isinstance(each, WithOperations)]
    assert len(choosing) > 10
    assert all(each.operations(torch.ones(2)) is CPUKernels for each in choosing)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).double()


def rope(positions: torch.Tensor) -> torch.Tensor:
    return rope_table(positions.float(), 4, 10.0, (True, False)).double()


QUERIES_AND_KEYS = normal(4, 4), 2 * normal(4, 4)
CASES = [
    (CPUKernels, "rms_norm", (normal(2, 3, 4), normal(4), 1e-3)),
    (CPUKernels, "rms_norm", (normal(1, 4), normal(4), 1e-3)),
    (CPUKernels, "modulated_norm", (normal(2, 3, 4), normal(2, 1, 4), -normal(2, 1, 4), 1e-3)),
    # One frame: sums and products have the shape of what they are made of.
    (CPUKernels, "modulated_norm", (normal(2, 1, 4), 2 * normal(2, 1, 4), -normal(2, 1, 4), 1e-3)),
    (CPUKernels, "add_gated", (normal(2, 3, 4), normal(2, 1, 4), -normal(2, 3, 4))),
    (CPUKernels, "add_gated", (normal(2, 1, 4), 2 * normal(2, 1, 4), -normal(2, 1, 4))),
    (CPUKernels, "normed_heads", (normal(1, 1, 4, 4, 4), QUERIES_AND_KEYS, None, 1e-3)),
    (CPUKernels, "normed_heads", (normal(2, 3, 4, 4, 4), QUERIES_AND_KEYS, None, 1e-3)),
    *(
        (CPUKernels, "normed_heads", (normal(2, 3, 4, 2, 4), (normal(4, 4),), table, 1e-3))
        for table in (rope(torch.arange(3)), rope(normal(2, 3)))
    ),
    *(
        (kernels, "silu_mul", (3 * normal(*sizes, 2, 4),))
        for kernels in (CPUKernels, InductorKernels)
        for sizes in ((1, 1), (2, 3))
    ),
    (CPUKernels, "sigmoid_mul", (normal(1, 1, 4), normal(1, 1, 2, 4)[..., 0, :])),
    (CPUKernels, "sigmoid_mul", (normal(2, 3, 4), normal(2, 3, 2, 4)[..., 0, :])),
]


def results_and_gradients(operation: Callable, inputs: tuple) -> list[torch.Tensor]:
    flat = [each for value in inputs for each in (value if type(value) is tuple else (value,))]
    leaves = [each for each in flat if isinstance(each, torch.Tensor) and each.dim() < 5]
    leaves += flat[:1] if flat[0].dim() == 5 else []  # another one is a table of rotations
    for leaf in leaves:
        leaf.requires_grad_()
    found = operation(*inputs)
    parts = found if isinstance(found, tuple) else (found,)
    weights = [(torch.arange(part.numel()) + n).sin().view_as(part) for n, part in enumerate(parts)]
    loss = sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
    return [*parts, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("kernels, name, inputs", CASES)
def test_each_kernel_computes_its_definition(kernels, name, inputs):
    """Results and gradients, in float64; inputs are left as they were."""
    before = [each.clone() for each in inputs if isinstance(each, torch.Tensor)]
    found = results_and_gradients(getattr(kernels, name), inputs)
    plain = results_and_gradients(getattr(Operations, name), inputs)
    for own, expected in zip(found, plain, strict=True):
        assert own.dtype == torch.float64
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        found = getattr(kernels, name)(*inputs)
    for own, expected in zip(found if isinstance(found, tuple) else (found,), plain):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-9)
    assert all(
        map(torch.equal, (each for each in inputs if isinstance(each, torch.Tensor)), before)
    )


def test_results_for_bfloat16_are_rounded_once():
    x, scale, shift = normal(64, 256).bfloat16(), normal(256).round(), normal(1, 256).bfloat16()
    for kernels, name, inputs in (
        (CPUKernels, "rms_norm", (x, shift[0])),
        (Operations, "rms_norm", (x, shift[0])),
        (CPUKernels, "modulated_norm", (x, scale.bfloat16(), shift)),  # 1 + scale is exact
    ):
        found = getattr(kernels, name)(*inputs, 0.5)
        expected = getattr(Operations, name)(*(each.double() for each in inputs), 0.5)
        assert found.dtype == torch.bfloat16
        assert ((found - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()
    both = 3 * normal(5, 2, 2, 7)
    expected = Operations.silu_mul(both.bfloat16().double())
    found = InductorKernels.silu_mul(both.bfloat16())
    assert found.dtype == torch.bfloat16
    assert ((found - expected).abs() <= expected.abs() * 2**-7).all()  # two roundings


@pytest.mark.parametrize(
    "device, compiling, kernels",
    [
        ("cpu", False, CPUKernels),
        ("cpu", True, Operations),
        ("meta", False, Operations),
        ("meta", True, InductorKernels),
    ],
)
def test_which_kernels_run_where(device, compiling, kernels, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    assert implementation(torch.ones(2, device=device)) is kernels
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    assert implementation(parameter) is (Operations if kernels is CPUKernels else kernels)
