"""The critical batch of gradients whose mean and variance are known."""

import pytest
import torch
from torch import nn

from torchtitan.models.dit_tts.infra.gradient_noise import GradientNoise

MEAN, NOISE = 0.02, 0.4
"""of every element of a sample's gradient: tr Σ / |G|² = 400"""


class Steps:
    """Steps of 24 samples in 3 micro-batches."""

    def __init__(self):
        self.parameters = [nn.Parameter(torch.zeros(300, 200)), nn.Parameter(torch.zeros(40_000))]
        self.unused = nn.Parameter(torch.zeros(5))
        self.noise = GradientNoise()
        self.random = torch.Generator().manual_seed(0)

    def step(self, scale: float = 1.0, mean: float = MEAN) -> float | None:
        for each in self.parameters:
            each.grad = torch.zeros_like(each)
        for micro_batch in range(3):
            for each in self.parameters:
                drawn = mean + NOISE / 8**0.5 * torch.randn(each.shape, generator=self.random)
                each.grad += scale * drawn / 3
            if micro_batch == 0:
                self.noise.after_first([*self.parameters, self.unused])
        norm = sum(each.grad.square().sum() for each in self.parameters).sqrt().item()
        return self.noise.critical_batch(norm, 3, 24)


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_noise_of_known_gradients(scale):
    steps = Steps()
    found = [steps.step(scale) for _ in range(40)]
    assert found[-1] == pytest.approx(400, rel=0.15)


def test_old_readings_fade():
    """Half the mean is four times the critical batch."""
    steps = Steps()
    for _ in range(20):
        steps.step(mean=2 * MEAN)
    found = [steps.step() for _ in range(60)]
    assert found[0] < 150
    assert found[-1] == pytest.approx(400, rel=0.2)


def test_nothing_where_nothing_can_be_read():
    steps = Steps()
    assert steps.noise.critical_batch(1.0, 3, 24) is None
    steps.noise.after_first(steps.parameters)  # without gradients, as of replicas
    assert steps.noise.critical_batch(1.0, 3, 24) is None
    assert steps.step(mean=0.0) is None or steps.step(mean=0.0) > 5000  # no signal
    for each in steps.parameters:
        each.grad = torch.ones_like(each) / 3
    same = GradientNoise()
    same.after_first(steps.parameters)
    assert same.critical_batch(100_000**0.5, 3, 24) is None  # no noise
    assert same.critical_batch(1.0, 3, 24) is None  # a reading is used once
