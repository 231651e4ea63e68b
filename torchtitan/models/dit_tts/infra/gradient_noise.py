"""The critical batch, from the moments that Adam has anyway.

McCandlish et al. 2018 (arXiv 1812.06162): batches larger than B = tr Σ / |G|² (their B_simple) save few steps, smaller
ones waste few samples. G is the mean gradient, Σ the covariance of one sample's.

Gradients g of b samples have E|g|² = |G|² + tr Σ / b, which the second moment averages. The first moment m is a mean
of gradients with weights whose squares add up to r, 1/19 for β1 = 0.9, so E|m|² = |G|² + r·tr Σ / b. These are two
equations for |G|² and tr Σ / b. They hold while G changes little within the moments' windows; what it turns in them
counts as noise.
"""

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Adam

from torchtitan.components.optimizer import OptimizersContainer


def critical_batches(optimizers: OptimizersContainer) -> float | None:
    """tr Σ / |G|² in batches of the size of the last steps, over all ranks.

    Collective where parameters are sharded; the host waits for the device. None where other optimizers than Adam and
    AdamW have a part (8-bit states are not read), before the second step, and where the noise hides G.
    """
    if not all(isinstance(optimizer, Adam) for optimizer in optimizers.optimizers):
        return None
    groups = [group for optimizer in optimizers.optimizers for group in optimizer.param_groups]
    state = {
        key: value for optimizer in optimizers.optimizers for key, value in optimizer.state.items()
    }
    if not state:
        return None
    beta1, beta2 = groups[0]["betas"]
    step = float(next(iter(state.values()))["step"])
    first = _norm([each["exp_avg"] for each in state.values()], 2.0) / (1 - beta1**step)
    second = _norm([each["exp_avg_sq"] for each in state.values()], 1.0) / (1 - beta2**step)
    weights = (1 - beta1) / (1 + beta1) * (1 + beta1**step) / (1 - beta1**step)
    noise, signal = second - first**2, first**2 - weights * second
    return noise / signal if noise > 0 and signal > 0 else None


def _norm(tensors: list[torch.Tensor], order: float) -> float:
    total = get_total_norm(tensors, order)
    return (total.full_tensor() if isinstance(total, DTensor) else total).item()
