"""Attention within samples that stand one behind the other, where there is no flash attention."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch


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
