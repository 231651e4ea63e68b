"""Muon (Jordan et al. 2024) for the decoder's large matrices, sharded and fused ones included."""

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from torchtitan.models.dit_tts.infra.matmul_weights import join_fused, split_fused
from torchtitan.models.dit_tts.infra.parallelize import local_tensor

# Quintic Newton-Schulz iteration: steep at zero, so that five iterations bring every singular value
# into about 0.7 to 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_EPSILON = 1e-7


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ. (N, rows, columns) to the same shape in bfloat16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


class Muon(Optimizer):
    """Orthogonalised Nesterov momentum with decoupled weight decay.

    torch.optim.Muon treats a parameter as one matrix. Here matrices fused into one parameter (q, k, v, gate)
    are orthogonalised separately, and sharded parameters are gathered first, since the singular vectors of
    a shard are not the matrix's. The update of a matrix (m, n) is scaled by 0.2·√max(m, n), to the root mean
    square of AdamW's, so learning rate and weight decay mean the same (Liu et al. 2025).

    If `found_inf` is a tensor of 1, a step leaves weights and momentum as they are.

    Args:
        layouts: (parts, rows) of `split_fused` for each parameter.
    """

    def __init__(
        self,
        layouts: dict[nn.Parameter, tuple[int, int]],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(layouts, defaults)
        self.layouts = layouts
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures here
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                buffer = state["momentum_buffer"]
                lr = group["lr"]
                if self.found_inf is not None:  # momentum in the gradient's place stays as it is
                    gradient = local_tensor(parameter.grad)
                    skipped = self.found_inf.bool()
                    torch.where(skipped, local_tensor(buffer), gradient, out=gradient)
                    lr = lr * (1 - self.found_inf)
                buffer.lerp_(parameter.grad, 1 - momentum)
                update = self._orthogonal(parameter, parameter.grad.lerp(buffer, momentum))
                weight = local_tensor(parameter)
                weight.mul_(1 - lr * group["weight_decay"]).sub_(local_tensor(update) * lr)

    def _orthogonal(self, parameter: nn.Parameter, update: torch.Tensor) -> torch.Tensor:
        """The scaled update, with the parameter's layout over ranks."""
        # bfloat16 halves the bytes sent, and the iteration uses it anyway.
        full = update
        if isinstance(update, DTensor):
            full = cast(DTensor, update.bfloat16()).full_tensor()
        parts, rows = self.layouts[parameter]
        matrices = orthogonalize(split_fused(full, parts, rows))
        matrices = matrices * (0.2 * max(matrices.shape[-2:]) ** 0.5)
        full = join_fused(matrices, rows).to(parameter.dtype)
        if not isinstance(update, DTensor):
            return full
        return distribute_tensor(full, update.device_mesh, update.placements, src_data_rank=None)
