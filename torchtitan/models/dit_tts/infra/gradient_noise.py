"""The critical batch, from the gradients of a step's first micro-batch and of all of them.

McCandlish et al. 2018 (arXiv 1812.06162): batches larger than B = tr Σ / |G|² (their B_simple) save few steps, smaller
ones waste few samples. G is the mean gradient, Σ the covariance of one sample's. A mean gradient g of b samples has
E|g|² = |G|² + tr Σ / b, so two sizes at the same weights give both. (Adam's moments would give them without a second
norm, but of gradients that the steps between them turn: in the debug model three times too much, or nothing.)
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

_KEPT = 0.99
"""weight of earlier steps: the difference of the norms is small where the batch is far below the critical one"""


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """() norm of all gradients, over all ranks that hold parts of them; 0 if there are none."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class GradientNoise:
    """Averages over the last steps of a start, without a wait for the device."""

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None
        """(2,) of tr Σ in samples and of |G|², float64; None where nothing was measured"""

    def after_first(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called after a step's first micro-batch of several. Nothing is measured under DDP and HSDP, whose replicas
        keep their gradients apart until the last one, and where FSDP2 keeps weights gathered, which have none."""
        parameters = list(parameters)
        any_gradient = any(each.grad is not None for each in parameters)
        self._first = gradient_norm(parameters) if any_gradient else None

    def add(
        self, norm: torch.Tensor, bad: torch.Tensor, micro_batches: int, samples: float
    ) -> None:
        """A step, unless `bad` () is 1.

        Args:
            norm: () of the step's gradient, whose micro-batches are equally large parts.
            samples: of the step.
        """
        if self._first is None:
            return
        part, whole = (self._first * micro_batches).square(), norm.square()
        self._first = None
        noise = samples * (part - whole) / (micro_batches - 1)
        signal = (micro_batches * whole - part) / (micro_batches - 1)
        found = torch.stack([noise, signal]).double()
        before = torch.zeros_like(found) if self.sums is None else self.sums
        self.sums = torch.where(bad.bool(), before, _KEPT * before + found)


def critical_batch(noise: float, signal: float) -> float | None:
    """B in samples, of `GradientNoise.sums`; None where the noise hides G."""
    return noise / signal if min(noise, signal) > 0 else None
