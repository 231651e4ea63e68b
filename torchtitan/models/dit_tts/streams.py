"""Samples that stand one behind the other in a single row: a packed batch has no padding between them."""

from typing import Any, NamedTuple

import torch


class Stream(NamedTuple):
    """Places of the samples in one row of L positions, which may have padding behind the last one.

    Attributes:
        segment: (L,) int64, sample of each position, in padding the last one.
        position: (L,) int64, index in the sample.
        starts: (S + 1,) int32, where each sample begins, and where the last one ends.
        longest: positions that a sample can have at most.
    """

    segment: torch.Tensor
    position: torch.Tensor
    starts: torch.Tensor
    longest: int

    @property
    def samples(self) -> int:
        return len(self.starts) - 1


class PackedStreams(NamedTuple):
    """The streams of a packed batch with S samples, some of which may have no frames or no caption."""

    frames: Stream
    text: Stream
    patches: Stream
    """of the references"""

    captions: Stream | None = None
    """padded to one length"""


def valid_mask(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """(B, size) bool, true before each row's length (B,)."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def stream_of(lengths: torch.Tensor, size: int, longest: int) -> Stream:
    """Samples of these lengths (S,), one behind the other in a row of `size` positions."""
    ends = lengths.cumsum(0)
    index = torch.arange(size, device=lengths.device)
    segment = torch.bucketize(index, ends, right=True).clamp_max(len(lengths) - 1)
    starts = torch.nn.functional.pad(ends, (1, 0))
    return Stream(segment, index - starts[segment], starts.int(), longest)


class _PerPosition(torch.autograd.Function):
    # The gradient is a matmul: an indexed sum would add one by one, in no fixed order on a GPU.
    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(segment)
        ctx.samples = table.shape[0]
        return table[segment]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        (segment,) = ctx.saved_tensors
        samples = torch.arange(ctx.samples, device=segment.device)
        return (samples[:, None] == segment).to(gradient.dtype) @ gradient, None


def per_position(table: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Each sample's row of a table (S, 1, D) at all of its positions, (1, L, D)."""
    return _PerPosition.apply(table[:, 0], stream.segment)[None]
