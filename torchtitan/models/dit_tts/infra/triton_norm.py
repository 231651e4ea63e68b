"""The residual stream's gated update, and RMSNorm, scale and shift of the sum, as one Triton kernel of the decoder's blocks, and
one for all of their gradients.

A row is in registers while its norm is computed, so everything is read once, and a result is rounded once. The backward pass
also adds the gradient that has come along the stream; for each chunk of `_CHUNK` frames it writes the sums that make the
gradients of gate, scale and shift, which are added in a second step. Chunks follow from the shape alone and nothing is added
atomically, so a result is the same bits in every run and on every device of a kind.

Importing this module imports triton, which decides by the environment variable TRITON_INTERPRET whether kernels run
on the CPU.
"""

from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd import Function

from torchtitan.models.dit_tts.infra import kernels
from torchtitan.models.dit_tts.model.operations import Operations
from torchtitan.models.dit_tts.streams import Stream

_CHUNK = 32
"""frames whose gradients of gate, scale and shift are added in registers"""


@triton.jit
def triton_gated_norm(
    x, update, gate, scale, shift, moved, out, frames, width, x_batch, x_frame, update_batch, update_frame,
    gate_batch, scale_batch, shift_batch, eps, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A frame of `width` numbers; the strides are of batch and frame. GATED: of x + gate·update, which becomes `moved`."""
    frame, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = (sample * frames + frame) * width + column
    values = tl.load(x + sample * x_batch + frame * x_frame + column, inside, other=0.0)
    if GATED:
        opened = tl.load(gate + sample * gate_batch + column, inside, other=0.0).to(tl.float32)
        change = update + sample * update_batch + frame * update_frame + column
        change = tl.load(change, inside, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + opened * change).to(moved.dtype.element_ty)
        tl.store(moved + place, values, inside)
    values = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values) / width + eps)
    factor = 1 + tl.load(scale + sample * scale_batch + column, inside, other=0.0).to(tl.float32)
    added = tl.load(shift + sample * shift_batch + column, inside, other=0.0).to(tl.float32)
    tl.store(out + place, values * inverse * factor + added, inside)


@triton.jit
def triton_gated_norm_backward(
    through, gradient, moved, update, gate, scale, d_moved, d_update, sums, frames, width, t_batch, t_frame,
    g_batch, g_frame, x_batch, x_frame, update_batch, update_frame, gate_batch, scale_batch, eps,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A chunk of a sample's frames: d_moved and d_update of each, and `sums` (B, chunks, 2 or 3, width) for scale, shift and
    gate. `through` is the gradient along the stream, and `gradient` that of the norm."""
    chunk, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = 1 + tl.load(scale + sample * scale_batch + column, inside, other=0.0).to(tl.float32)
    d_scale = tl.zeros([BLOCK], tl.float32)
    d_shift = tl.zeros([BLOCK], tl.float32)
    d_gate = tl.zeros([BLOCK], tl.float32)
    opened = tl.zeros([BLOCK], tl.float32)
    if GATED:
        opened += tl.load(gate + sample * gate_batch + column, inside, other=0.0).to(tl.float32)
    for frame in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, frames)):
        place = moved + sample * x_batch + frame * x_frame + column
        values = tl.load(place, inside, other=0.0).to(tl.float32)
        place = gradient + sample * g_batch + frame * g_frame + column
        given = tl.load(place, inside, other=0.0).to(tl.float32)
        place = through + sample * t_batch + frame * t_frame + column
        along = tl.load(place, inside, other=0.0).to(tl.float32)
        # Neither sum waits for the other: mean is that of given·factor·values, without the norm.
        mean = tl.sum(given * factor * values) / width
        inverse = tl.rsqrt(tl.sum(values * values) / width + eps)
        normed = values * inverse
        d_scale += given * normed
        d_shift += given
        whole = along + (given * factor - normed * inverse * mean) * inverse
        place = (sample * frames + frame) * width + column
        tl.store(d_moved + place, whole, inside)
        if GATED:
            change = update + sample * update_batch + frame * update_frame + column
            d_gate += whole * tl.load(change, inside, other=0.0).to(tl.float32)
            tl.store(d_update + place, whole * opened, inside)
    place = sums + (sample * tl.num_programs(0) + chunk) * (3 if GATED else 2) * width + column
    tl.store(place, d_scale, inside)
    tl.store(place + width, d_shift, inside)
    if GATED:
        tl.store(place + 2 * width, d_gate, inside)


def _launch_options(width: int) -> dict[str, int]:
    """A row in one block, at most 16 numbers of it in each thread."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _rows(*given: torch.Tensor) -> list[torch.Tensor]:
    """Tensors, each of whose rows is contiguous."""
    return [each if each.stride(-1) == 1 else each.contiguous() for each in given]


def _promoted(*given: torch.Tensor | None) -> torch.dtype:
    return reduce(torch.promote_types, (each.dtype for each in given if each is not None))


@torch.library.custom_op("dit_tts::gated_norm", mutates_args=())
def gated_norm(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> list[torch.Tensor]:
    """RMSNorm of x + gate·update (B, T, D), or of x without them, times 1 + scale, plus shift; the last and gate (B, 1, D).
    Computed in float32.

    Returns:
        (B, T, D) in the dtype to which all promote, and with an update the sum, in that of its terms.

    Raises:
        ValueError: for float64, which it would round.
    """
    if x.dtype == torch.float64:
        raise ValueError("the Triton kernel computes in float32, but x is float64")
    gated = update is not None and gate is not None
    results = _results(x, update, gate, scale, shift, eps)
    # Without an update nothing is read or written in its place.
    x, update, gate, scale, shift = _rows(
        x, x if update is None else update, scale if gate is None else gate, scale, shift
    )
    samples, frames, width = x.shape
    batches = (each.stride(0) for each in (gate, scale, shift))
    triton_gated_norm[(frames, samples)](
        x, update, gate, scale, shift, results[-1], results[0], frames, width, *x.stride()[:2],
        *update.stride()[:2], *batches, eps, **_launch_options(width), GATED=gated,
    )  # fmt: skip
    return results


@gated_norm.register_fake
def _results(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> list[torch.Tensor]:
    dtypes = [_promoted(x, update, gate, scale, shift)]
    dtypes += [] if update is None else [_promoted(x, update, gate)]
    return [x.new_empty(x.shape, dtype=dtype) for dtype in dtypes]


@torch.library.custom_op("dit_tts::gated_norm_backward", mutates_args=())
def _backward(
    through: torch.Tensor,
    gradient: torch.Tensor,
    moved: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    eps: float,
) -> list[torch.Tensor]:
    """The gradients of scale, shift and gate in parts (B, chunks, 2 or 3, D) float32, of `moved`, and of an update."""
    gated = update is not None and gate is not None
    found = _gradients(through, gradient, moved, update, gate, scale, eps)
    through, gradient, moved, update, gate, scale = _rows(
        *(through, gradient, moved),
        moved if update is None else update,
        scale if gate is None else gate,
        scale,
    )
    samples, frames, width = moved.shape
    strides = [n for each in (through, gradient, moved, update) for n in each.stride()[:2]]
    triton_gated_norm_backward[(found[0].shape[1], samples)](
        through, gradient, moved, update, gate, scale, found[1], found[-1], found[0], frames, width,
        *strides, gate.stride(0), scale.stride(0), eps,
        **_launch_options(width), CHUNK=_CHUNK, GATED=gated,
    )  # fmt: skip
    return found


@_backward.register_fake
def _gradients(
    through: torch.Tensor,
    gradient: torch.Tensor,
    moved: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    eps: float,
) -> list[torch.Tensor]:
    samples, frames, width = moved.shape
    sums = (samples, -(-frames // _CHUNK), 2 if update is None else 3, width)
    same = [moved.new_empty(moved.shape) for _ in range(1 if update is None else 2)]
    return [moved.new_empty(sums, dtype=torch.float32), *same]


class _GatedNorm(Function):
    """Two operations for a compiler, whose backward pass it sees: it fuses the second step of the sums with what follows."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        update: torch.Tensor | None,
        gate: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, *sums = gated_norm(x, update, gate, scale, shift, eps)
        # Without an update the stream passes, too: its gradient is added here.
        moved = sums[0] if sums else x.view_as(x)
        ctx.save_for_backward(sums[0] if sums else x, update, gate, scale)
        ctx.eps = eps
        ctx.dtypes = [None if g is None else g.dtype for g in (x, update, gate, scale, shift)]
        return moved, normed

    @staticmethod
    def backward(ctx: Any, through: torch.Tensor, gradient: torch.Tensor):  # type: ignore[override]
        parts, d_x, *d_update = _backward(through, gradient, *ctx.saved_tensors, ctx.eps)
        d_scale, d_shift, *d_gate = (each[:, None] for each in parts.sum(1).unbind(1))
        found = d_x, *(d_update or [None]), *(d_gate or [None]), d_scale, d_shift
        given = zip(found, ctx.dtypes, strict=True)
        return *(each if each is None else each.to(dtype) for each, dtype in given), None


class _TritonNorm(Operations):
    @staticmethod
    def modulated_norm(
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        packed: Stream | None = None,
    ) -> torch.Tensor:
        return _TritonNorm.gated_norm(x, None, None, scale, shift, eps, packed)[1]

    @staticmethod
    def gated_norm(
        x: torch.Tensor,
        update: torch.Tensor | None,
        gate: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        packed: Stream | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert packed is None  # the config is refused
        # A sampler's rows share one time.
        scale, shift = (each.expand(len(x), -1, -1) for each in (scale, shift))
        gate = None if gate is None else gate.expand(len(x), -1, -1)
        return _GatedNorm.apply(x, update, gate, scale, shift, eps)


class _TritonNormAndInductor(_TritonNorm, kernels.InductorKernels):
    pass


def implementation(x: torch.Tensor) -> type[Operations]:
    """The operations for a tensor like x on a GPU: gated updates and modulated norms by Triton, the rest as without it."""
    compiled = kernels.implementation(x) is kernels.InductorKernels
    return _TritonNormAndInductor if compiled else _TritonNorm
