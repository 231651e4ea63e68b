"""The critical batch of gradients whose mean and variance are known."""

import pytest
import torch
from torch import nn

from torchtitan.models.dit_tts.infra.gradient_noise import GradientNoise, critical_batch

MEAN, NOISE = 0.02, 0.4
"""of every element of a sample's gradient: tr Σ / |G|² = 400"""


class Steps:
    """Steps of 24 samples in 3 micro-batches."""

    def __init__(self):
        self.parameters = [nn.Parameter(torch.zeros(*each)) for each in ((300, 200), (40_000,))]
        self.unused = nn.Parameter(torch.zeros(5))
        self.noise = GradientNoise()
        self.random = torch.Generator().manual_seed(0)

    def steps(self, number: int, scale: float = 1.0, mean: float = MEAN, bad: float = 0.0):
        for _ in range(number):
            for each in self.parameters:
                each.grad = torch.zeros_like(each)
            for micro_batch in range(3):
                for each in self.parameters:
                    drawn = mean + NOISE / 8**0.5 * torch.randn(each.shape, generator=self.random)
                    each.grad += scale * drawn / 3
                if micro_batch == 0:
                    self.noise.after_first([*self.parameters, self.unused])
            squares = [each.grad.square().sum() for each in self.parameters]
            self.noise.add(sum(squares).sqrt(), torch.tensor(bad), 3, 24)
        return critical_batch(*self.noise.sums.tolist())


def test_old_steps_fade_bad_ones_do_not_count_and_no_scale_changes_it():
    """Half the mean is four times the critical batch."""
    assert Steps().steps(60, scale=7.0) == pytest.approx(400, rel=0.15)
    steps = Steps()
    before = steps.steps(40, mean=2 * MEAN)
    assert before == pytest.approx(100, rel=0.1)
    assert steps.steps(3, scale=1e3, bad=1.0) == before == steps.steps(1, float("nan"), bad=1.0)
    assert 105 < steps.steps(15) < 200
    assert steps.steps(300) == pytest.approx(400, rel=0.2)


def test_nothing_where_nothing_can_be_read():
    steps, good = Steps(), torch.zeros(())
    steps.noise.after_first(steps.parameters)  # without gradients, as of replicas
    steps.noise.add(torch.ones(()), good, 3, 24)
    assert steps.noise.sums is None
    for each in steps.parameters:
        each.grad = torch.ones_like(each) / 3
    steps.noise.after_first(steps.parameters)
    steps.noise.add(torch.tensor(100_000**0.5), good, 3, 24)
    before = steps.noise.sums
    assert critical_batch(*before.tolist()) is None  # no noise
    steps.noise.add(torch.ones(()), good, 3, 24)  # its first micro-batch was not seen
    assert steps.noise.sums is before
