"""The critical batch of gradients whose mean and variance are known."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from torchtitan.models.dit_tts.infra.gradient_noise import critical_batches
from torchtitan.models.dit_tts.infra.low_precision_adamw import BFloat16AdamW

SIZES = ((300, 200), (40_000,))
MEAN = 0.02


class Container:
    def __init__(self, *optimizers):
        self.optimizers = optimizers


def train(optimizer, parameters, noise: float, steps: int):
    """Gradients of mean MEAN and standard deviation `noise` in every element; the rate is 0."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for each in parameters:
            each.grad = MEAN + noise * torch.randn(each.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("kind", [Adam, AdamW, BFloat16AdamW])
@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("steps", [2, 5, 200])
def test_noise_of_known_gradients(kind, noise, steps):
    """tr Σ / |G|² = (noise / MEAN)², also while the moments are young."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SIZES]
    options = {"foreach": False, "fused": False} if kind is BFloat16AdamW else {}
    optimizers = [kind([p], lr=0.0, betas=(0.9, 0.95), **options) for p in parameters]
    for optimizer, parameter in zip(optimizers, parameters):
        train(optimizer, [parameter], noise, steps)
    assert critical_batches(Container(*optimizers)) == pytest.approx((noise / MEAN) ** 2, rel=0.1)


def test_nothing_where_nothing_can_be_read():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SIZES]
    adam = AdamW(parameters, lr=0.0)
    assert critical_batches(Container(adam)) is None
    train(adam, parameters, 0.01, 1)  # one gradient has no variance
    assert critical_batches(Container(adam)) is None
    train(adam, parameters, 0.01, 20)
    assert critical_batches(Container(adam)) == pytest.approx(0.25, rel=0.1)
    assert critical_batches(Container(adam, SGD(parameters, lr=0.0))) is None
    for state in adam.state.values():
        state["exp_avg"].zero_()  # all of the second moment is noise
    assert critical_batches(Container(adam)) is None
