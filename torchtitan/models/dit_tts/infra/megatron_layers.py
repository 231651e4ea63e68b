"""Megatron-Core's matrix products on this rank's part of a weight. Importing this module imports Megatron-Core.

Process groups, data parallelism, optimizer and checkpoints stay TorchTitan's. A plain Linear becomes one of
these classes in place and keeps its parameter.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.models.dit_tts.infra import tensor_collectives
from torchtitan.models.dit_tts.infra.tensor_collectives import (
    Group,
    cast_for_autocast,
    column_product,
    group_of,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex and TransformerEngine are not installed
    from megatron.core.tensor_parallel.layers import (
        linear_with_grad_accumulation_and_async_allreduce,
    )
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


def sum_gradients(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`tensor_collectives.sum_gradients` for a process group."""
    return tensor_collectives.sum_gradients(x, group_of(group))


def _product(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return linear_with_grad_accumulation_and_async_allreduce(
        *cast_for_autocast(x, weight),
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=group,
    )


class MegatronColumn(nn.Linear):
    """x (B, L, in) to this rank's rows of the product, (B, L, out / ranks)."""

    group: dist.ProcessGroup
    summed: Group | None
    """of the ranks over which it sums the gradient of x; None: the caller does"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.summed is None:
            return _product(x, self.weight, self.group)
        # Megatron's own overlap (`allreduce_dgrad`) is a break in a compiled graph.
        return column_product(x, self.weight, self.summed)


class MegatronRow(nn.Linear):
    """This rank's columns x (B, L, in / ranks) of the input to the product, (B, L, out), on every rank."""

    group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = _product(x, self.weight, self.group)
        return reduce_from_tensor_model_parallel_region(partial, self.group)
