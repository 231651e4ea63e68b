"""Megatron-Core's matrix products on this rank's part of a weight. Importing this module imports Megatron-Core.

Process groups, data parallelism, optimizer and checkpoints stay TorchTitan's. A plain Linear becomes one of
these classes in place and keeps its parameter.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex and TransformerEngine are not installed
    from megatron.core.tensor_parallel.layers import (
        linear_with_grad_accumulation_and_async_allreduce,
    )
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


def summed(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks of the group, in new memory: autograd may give the same tensor to others.
    (Megatron's function sums in place, and returns a gradient that is not contiguous unsummed.)"""
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        return summed(gradient, ctx.group), None


def sum_gradients(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x, of whose gradient each rank of the group computes a part."""
    return _SumGradients.apply(x, group)


def _product(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # Megatron saves the operands as they are given: without the cast of autocast its backward pass would
    # multiply different dtypes on a CPU.
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
    return linear_with_grad_accumulation_and_async_allreduce(
        x,
        weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=group,
    )


class MegatronColumn(nn.Linear):
    """x (B, L, in) to this rank's rows of the product, (B, L, out / ranks)."""

    group: dist.ProcessGroup
    sums_gradient: bool
    """of x over the ranks; else the caller sums it"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = sum_gradients(x, self.group) if self.sums_gradient else x
        return _product(x, self.weight, self.group)


class MegatronRow(nn.Linear):
    """This rank's columns x (B, L, in / ranks) of the input to the product, (B, L, out), on every rank."""

    group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = _product(x, self.weight, self.group)
        return reduce_from_tensor_model_parallel_region(partial, self.group)
