"""Megatron-Core's layers on the weights of the plain model. Importing this module imports Megatron-Core.

Of Megatron its layers alone are used: process groups, data parallelism, optimizer and checkpoints stay
TorchTitan's.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex and TransformerEngine are not installed
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def summed(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Over the ranks of the group, in new memory: autograd may give the same tensor to others. (Megatron's
    own function sums in place, and of a gradient that is not contiguous it returns the unsummed one.)"""
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


def in_matmul_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """As autocast would have it. Megatron's functions save operands as they are given, and on a CPU their
    backward pass would multiply different dtypes."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def leave_weight(weight: torch.Tensor) -> None:
    """The model's own `init_weights` fills it."""


def _arguments(linear: nn.Linear, group: dist.ProcessGroup) -> dict[str, Any]:
    """Of both kinds of layers."""
    config = ModelParallelConfig(
        params_dtype=linear.weight.dtype,
        use_cpu_initialization=True,  # on the device of the context
        perform_initialization=False,
    )
    return {
        "input_size": linear.in_features,
        "output_size": linear.out_features,
        "config": config,
        "init_method": leave_weight,
        "bias": False,
        "tp_group": group,
    }


class MegatronColumn(ColumnParallelLinear):
    """x (B, L, in) to this rank's rows of the product, (B, L, out / ranks).

    Args:
        linear: whose sizes and dtype it has.
        enters: the gradient of x is summed over the ranks. Else the caller does that.
    """

    # Theirs adds an entry beside the weight to state dicts.
    get_extra_state = nn.Module.get_extra_state

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup, enters: bool):
        arguments = _arguments(linear, group)
        super().__init__(**arguments, gather_output=False, disable_grad_reduce=True)
        self.entered = group if enters else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x if self.entered is None else sum_gradients(x, self.entered)
        return super().forward(in_matmul_dtype(x))[0]


class MegatronRow(RowParallelLinear):
    """This rank's columns x (B, L, in / ranks) of the input to the product, (B, L, out), on every rank."""

    get_extra_state = nn.Module.get_extra_state

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup):
        arguments = _arguments(linear, group)
        super().__init__(**arguments, input_is_parallel=True, skip_bias_add=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(in_matmul_dtype(x))[0]
