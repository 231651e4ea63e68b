"""Rows packed sample by sample, and attention within samples where there is no flash attention."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

Streams = tuple[torch.Tensor, ...] | list[torch.Tensor]
"""Keys, or values, of self, text and speaker, each (B, L, H, K)."""


class Packing(NamedTuple):
    """Rows (B, N) in a buffer of B·N rows: the valid ones first, sample by sample, then the others.

    It is a permutation, so every row of the buffer is written.
    """

    position: torch.Tensor | None
    """(B, N) int64, of each row in the buffer; None: B is 1, and the rows are in this order"""

    valid: torch.Tensor
    """(B, N) bool"""

    starts: torch.Tensor
    """(S + 1,) int32, index at which each sample starts in the buffer, and at which the last one ends"""

    longest: int
    """rows that a sample can have at most"""

    def pack(self, *streams: torch.Tensor) -> torch.Tensor:
        """Streams (B, L, H, K) whose lengths L add up to N, to the buffer (B·N, H, K)."""
        return _Pack.apply(self.position, self.valid, *streams)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """The buffer (B·N, H, K) to (B, N, H, K), zero at rows that are not valid."""
        return _Unpack.apply(self.position, self.valid, rows)


# Flash attention does not write rows of its output and gradients that belong to no sample. So results are read
# at valid rows only, and zero elsewhere. Each row is written and read once, without atomic additions, so the
# result is deterministic.


def _put(position: torch.Tensor | None, streams: Streams) -> torch.Tensor:
    if position is None:
        return streams[0][0]
    rows = streams[0].new_empty(position.numel(), *streams[0].shape[2:])
    lengths = [stream.shape[1] for stream in streams]
    for part, stream in zip(position.split(lengths, dim=1), streams):
        rows[part] = stream
    return rows


def _take(position: torch.Tensor | None, valid: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    taken = rows[None] if position is None else rows[position]
    return torch.where(valid[..., None, None], taken, 0.0)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, position: torch.Tensor | None, valid: torch.Tensor, *streams: torch.Tensor):
        ctx.save_for_backward(position, valid)
        ctx.lengths = [stream.shape[1] for stream in streams]
        return _put(position, streams)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        position, valid = (
            (None,) * len(ctx.lengths) if tensor is None else tensor.split(ctx.lengths, dim=1)
            for tensor in ctx.saved_tensors
        )
        return None, None, *(_take(*part, gradient) for part in zip(position, valid, strict=True))


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, position: torch.Tensor | None, valid: torch.Tensor, rows: torch.Tensor):
        ctx.save_for_backward(position)
        return _take(position, valid, rows)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        # The kernel does not read the other rows' gradients.
        (position,) = ctx.saved_tensors
        return None, None, _put(position, [gradient])


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    q_max: int,
    k_max: int,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """`varlen_attn` for devices and dtypes without flash attention, sample by sample. Waits for the device."""
    return _attend_samples(q, k, v, q_starts, k_starts, window_size[1] == 0)


# One operation for a compiler, as its shapes depend on the lengths. The probabilities are computed again in the
# backward pass: their number depends on the lengths, too.
@torch.library.custom_op("dit_tts::attend_samples", mutates_args=())
def _attend_samples(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    out = torch.zeros_like(q)
    for rows, keys in _spans(q_starts, k_starts):
        probabilities = _probabilities(q[rows], k[keys], causal)
        out[rows] = (probabilities @ v[keys].transpose(0, 1)).transpose(0, 1)
    return out


@torch.library.custom_op("dit_tts::attend_samples_backward", mutates_args=())
def _attend_samples_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = d_q, d_k, d_v = [torch.zeros_like(x) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5
    for rows, keys in _spans(q_starts, k_starts):
        probabilities = _probabilities(q[rows], k[keys], causal)
        d_out, own_q, own_k, own_v = (
            x.transpose(0, 1) for x in (gradient[rows], q[rows], k[keys], v[keys])
        )
        d_v[keys] = (probabilities.mT @ d_out).transpose(0, 1)
        d_scores = torch.ops.aten._softmax_backward_data(
            d_out @ own_v.mT, probabilities, -1, q.dtype
        ).mul_(scale)
        d_q[rows] = (d_scores @ own_k).transpose(0, 1)
        d_k[keys] = (d_scores.mT @ own_q).transpose(0, 1)
    return tuple(gradients)  # type: ignore[return-value]


def _spans(q_starts: torch.Tensor, k_starts: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each sample that has queries."""
    ends = (itertools.pairwise(starts.tolist()) for starts in (q_starts, k_starts))
    for rows, keys in zip(*ends, strict=True):
        if rows[0] < rows[1]:
            yield slice(*rows), slice(*keys)


def _probabilities(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """(H, T, K) of queries (T, H, K) and keys."""
    scores = (q.transpose(0, 1) * q.shape[-1] ** -0.5) @ k.transpose(0, 1).mT
    if causal:
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, -1)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


_attend_samples.register_fake(lambda q, *rest: torch.empty_like(q))
_attend_samples_backward.register_fake(
    lambda gradient, q, k, v, *rest: tuple(torch.empty_like(x) for x in (q, k, v))
)
_attend_samples.register_autograd(
    lambda ctx, gradient: (
        *_attend_samples_backward(gradient, *ctx.saved_tensors, ctx.causal),
        *(None,) * 3,
    ),
    setup_context=_save_inputs,
)
