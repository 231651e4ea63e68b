"""Collectives of tensor and sequence parallelism with their gradients, overlapped with products.

Under sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) each rank has its part of the frames
between a block's products: of x (B, T, D) it has (B, t, D), t = T / ranks, rounded up. Collectives join and divide
the first dimension, so what has all frames is laid out (ranks·B, t, ...) there.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
import torch.nn.functional as F
from torch import nn

_ops = torch.ops._c10d_functional


@dataclass
class Group:
    """A process group as a compiled graph can have it."""

    name: str
    ranks: int
    rank: int
    frames: int = 0
    """T of the micro-batch whose frames they share; noted before the first block"""


def group_of(group: dist.ProcessGroup) -> Group:
    return Group(group.group_name, group.size(), group.rank())


@torch.library.custom_op("dit_tts::gather_again", mutates_args=())
def _gather_again(x: torch.Tensor, after: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Starts the gathering of x in the backward pass. Since it needs the gradient `after`, no compiler finds
    that the forward pass has gathered x before, and keeps that."""
    # Of a copy: to a compiler x is read when this returns, and its memory free.
    return _ops.all_gather_into_tensor(x.clone(), ranks, group)


@_gather_again.register_fake
def _(x: torch.Tensor, after: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return x.new_empty(ranks * x.shape[0], *x.shape[1:])


def _start(kind: str, x: torch.Tensor, group: Group) -> torch.Tensor:
    x = x.contiguous()
    if kind == "sum":
        return _ops.all_reduce(x, "sum", group.name)
    if kind == "gather":
        return _ops.all_gather_into_tensor(x, group.ranks, group.name)
    assert kind == "sum and divide"
    return _ops.reduce_scatter_tensor(x, "sum", group.ranks, group.name)


def communicate(kind: str, x: torch.Tensor, group: Group) -> torch.Tensor:
    """x as the ranks make it: the sum, all ranks' in the first dimension, or this rank's part of either."""
    if kind == "keep":
        return x.view_as(x)
    if kind == "divide":
        return x.chunk(group.ranks)[group.rank].clone()  # a view would keep all of it
    return _ops.wait_tensor(_start(kind, x, group))


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: str, backward: str, group: Group):
        ctx.kind, ctx.group = backward, group
        return communicate(forward, x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        return communicate(ctx.kind, gradient, ctx.group), None, None, None


def sum_gradients(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x, of whose gradient each rank of the group computes a part."""
    return _Collective.apply(x, "keep", "sum", group)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: Group, sequence: bool):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence = group, sequence
        return (communicate("gather", x, group) if sequence else x).matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        (x, weight), group = ctx.saved_tensors, ctx.group
        if ctx.sequence:
            x = _gather_again(x, gradient, group.ranks, group.name)
        partial = gradient.matmul(weight)
        if ctx.sequence:
            x = _ops.wait_tensor(x)
        total = _start("sum and divide" if ctx.sequence else "sum", partial, group)
        of_weight = gradient.flatten(0, 1).t().matmul(x.flatten(0, 1))
        return _ops.wait_tensor(total), of_weight, None, None


def cast_for_autocast(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands as autocast would cast them. Otherwise the backward pass would multiply different dtypes on
    a CPU."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype)


def column_product(
    x: torch.Tensor, weight: torch.Tensor, group: Group, sequence: bool = False
) -> torch.Tensor:
    """x (B, T, in) times this rank's rows of the weight, (B, T, out / ranks); with `sequence` x has this rank's
    frames, and the result is laid out by ranks. In the backward pass one product runs during the sum of x's
    gradient, and the other one during x's gathering."""
    return _ColumnProduct.apply(*cast_for_autocast(x, weight), group, sequence)


def _by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """(B, T, ...) to (ranks·B, t, ...)."""
    if padding := -x.shape[1] % ranks:
        x = F.pad(x, (0, 0, 0, padding))
    return x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)


def _by_sample(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The reverse."""
    x = x.unflatten(0, (group.ranks, -1)).transpose(0, 1).flatten(1, 2)
    return x[:, : group.frames]


class SequenceColumn(nn.Linear):
    """This rank's frames of x, (B, t, in), to its rows of the product for all frames, (B, T, out / ranks)."""

    group: Group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _by_sample(column_product(x, self.weight, self.group, sequence=True), self.group)


class SequenceRow(nn.Linear):
    """This rank's columns x (B, T, in / ranks) of the input to its frames of the product, (B, t, out)."""

    group: Group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = F.linear(_by_rank(x, self.group.ranks), self.weight)
        return _Collective.apply(partial, "sum and divide", "gather", self.group)


def divide_frames(model: nn.Module, group: Group) -> None:
    """Gives the decoder's blocks this rank's frames, and what follows them all frames. To be called after
    blocks are compiled, whose graphs then are alike."""

    @torch.compiler.disable
    def divide(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *others = args
        group.frames = x.shape[1]
        x = _by_rank(x, group.ranks)
        return _Collective.apply(x, "divide", "gather", group), *others

    @torch.compiler.disable
    def gather(_: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        # Each rank computes what follows alike, so of its gradient it takes its own part.
        return _by_sample(_Collective.apply(args[0], "gather", "divide", group), group)

    cast(nn.ModuleList, model.layers)[0].register_forward_pre_hook(divide)
    cast(nn.Module, model.norm).register_forward_pre_hook(gather)
