"""The critical batch, from the gradients of a step's first micro-batch and of all of them.

McCandlish et al. 2018 (arXiv 1812.06162): batches larger than B = tr Σ / |G|² (their B_simple) save few steps, smaller
ones waste few samples. G is the mean gradient, Σ the covariance of one sample's. A mean gradient g of b samples has
E|g|² = |G|² + tr Σ / b, so two sizes at the same weights give both. (Adam's moments would give them without a second
norm, but of gradients that the steps between them turn: in a run of the debug model three times too much, or nothing.)
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

_KEPT = 0.9
"""weight of earlier readings"""


class GradientNoise:
    """Averages over the last logged steps of a start, of tr Σ in samples and of |G|²."""

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None
        self._noise = self._signal = 0.0

    def after_first(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called after a step's first micro-batch of several. The host does not wait for the device. Nothing is
        measured where replicas keep their gradients apart until the last one."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        norm = get_total_norm(gradients, foreach=True) if gradients else None
        self._first = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def critical_batch(self, norm: float, micro_batches: int, samples: float) -> float | None:
        """B in samples; None where nothing was measured, or the noise hides G.

        Args:
            norm: of the step's gradient, whose micro-batches are equally large parts.
            samples: of the step.
        """
        if self._first is None:
            return None
        part, whole = (self._first.item() * micro_batches) ** 2, norm**2
        self._first = None
        noise = samples * (part - whole) / (micro_batches - 1)
        signal = (micro_batches * whole - part) / (micro_batches - 1)
        self._noise = _KEPT * self._noise + noise
        self._signal = _KEPT * self._signal + signal
        return self._noise / self._signal if min(self._noise, self._signal) > 0 else None
