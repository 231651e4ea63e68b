"""RMSNorm, scale and shift of the decoder's blocks as one Triton kernel, and one for all of their gradients.

A row is in registers while its norm is computed, so x is read once, and the result is rounded once. The backward pass
reads x and the output's gradient once: it writes the gradient of x, and for each chunk of `_CHUNK` frames the sums that
make the gradients of scale and shift, which are added in a second step. Chunks follow from the shape alone and nothing is
added atomically, so a result is the same bits in every run and on every device of a kind.

Importing this module imports triton, which decides by the environment variable TRITON_INTERPRET whether kernels run
on the CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from torchtitan.models.dit_tts.infra import kernels
from torchtitan.models.dit_tts.model.operations import Operations
from torchtitan.models.dit_tts.streams import Stream

_CHUNK = 32
"""frames whose gradients of scale and shift are added in registers"""


@triton.jit
def triton_modulated_norm(
    x, scale, shift, out, frames, width, x_batch, x_frame, scale_batch, shift_batch, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A frame of `width` numbers; the strides are of batch and frame."""
    frame, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = x + sample * x_batch + frame * x_frame + column
    values = tl.load(place, inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values) / width + eps)
    factor = 1 + tl.load(scale + sample * scale_batch + column, inside, other=0.0).to(tl.float32)
    added = tl.load(shift + sample * shift_batch + column, inside, other=0.0).to(tl.float32)
    place = out + (sample * frames + frame) * width + column
    tl.store(place, values * inverse * factor + added, inside)


@triton.jit
def triton_modulated_norm_backward(
    gradient, x, scale, d_x, sums, frames, width, g_batch, g_frame, x_batch, x_frame, scale_batch, eps,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of a sample's frames: d_x of each, and `sums` (B, chunks, 2, width) for scale and shift."""
    chunk, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = 1 + tl.load(scale + sample * scale_batch + column, inside, other=0.0).to(tl.float32)
    d_scale = tl.zeros([BLOCK], tl.float32)
    d_shift = tl.zeros([BLOCK], tl.float32)
    for frame in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, frames)):
        place = x + sample * x_batch + frame * x_frame + column
        values = tl.load(place, inside, other=0.0).to(tl.float32)
        place = gradient + sample * g_batch + frame * g_frame + column
        given = tl.load(place, inside, other=0.0).to(tl.float32)
        # Neither sum waits for the other: mean is that of given·factor·values, without the norm.
        mean = tl.sum(given * factor * values) / width
        inverse = tl.rsqrt(tl.sum(values * values) / width + eps)
        normed = values * inverse
        d_scale += given * normed
        d_shift += given
        place = d_x + (sample * frames + frame) * width + column
        tl.store(place, (given * factor - normed * inverse * mean) * inverse, inside)
    place = sums + (sample * tl.num_programs(0) + chunk) * 2 * width + column
    tl.store(place, d_scale, inside)
    tl.store(place + width, d_shift, inside)


def _launch_options(width: int) -> dict[str, int]:
    """A row in one block, at most 16 numbers of it in each thread."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x, each of whose rows is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Two operations for a compiler, whose backward pass it sees: it fuses the second step of the sums with what follows.
@torch.library.custom_op("dit_tts::modulated_norm", mutates_args=())
def modulated_norm(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm of x (B, T, D) times 1 + scale, plus shift, both (B, 1, D), computed in float32.

    Returns:
        (B, T, D) in the dtype to which x, scale and shift promote.

    Raises:
        ValueError: for float64, which it would round.
    """
    if x.dtype == torch.float64:
        raise ValueError("the Triton kernel computes in float32, but x is float64")
    out = _result(x, scale, shift, eps)
    x, scale, shift = _rows(x), _rows(scale), _rows(shift)
    samples, frames, width = x.shape
    strides = *x.stride()[:2], scale.stride(0), shift.stride(0)
    triton_modulated_norm[(frames, samples)](
        x, scale, shift, out, frames, width, *strides, eps, **_launch_options(width)
    )
    return out


@modulated_norm.register_fake
def _result(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.promote_types(scale.dtype, shift.dtype))
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("dit_tts::modulated_norm_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x, and those of scale and shift in parts (B, chunks, 2, D) float32."""
    d_x, sums = _gradients(gradient, x, scale, eps)
    gradient, x, scale = _rows(gradient), _rows(x), _rows(scale)
    samples, frames, width = x.shape
    strides = *gradient.stride()[:2], *x.stride()[:2], scale.stride(0)
    triton_modulated_norm_backward[(sums.shape[1], samples)](
        gradient, x, scale, d_x, sums, frames, width, *strides, eps,
        **_launch_options(width), CHUNK=_CHUNK,
    )  # fmt: skip
    return d_x, sums


@_backward.register_fake
def _gradients(
    gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    samples, frames, width = x.shape
    sums = (samples, -(-frames // _CHUNK), 2, width)
    return x.new_empty(x.shape), x.new_empty(sums, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, scale, shift, ctx.eps = inputs
    ctx.save_for_backward(x, scale)
    ctx.dtypes = scale.dtype, shift.dtype


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    d_x, parts = _backward(gradient, *ctx.saved_tensors, ctx.eps)
    sums = parts.sum(1).unbind(1)
    d_scale, d_shift = (s[:, None].to(dtype) for s, dtype in zip(sums, ctx.dtypes, strict=True))
    return d_x, d_scale, d_shift, None


modulated_norm.register_autograd(_differentiate, setup_context=_save)


class _TritonNorm(Operations):
    @staticmethod
    def modulated_norm(
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        packed: Stream | None = None,
    ) -> torch.Tensor:
        assert packed is None  # the config is refused
        # A sampler's rows share one time.
        scale, shift = (each.expand(len(x), -1, -1) for each in (scale, shift))
        return modulated_norm(x, scale, shift, eps)


class _TritonNormAndInductor(_TritonNorm, kernels.InductorKernels):
    pass


def implementation(x: torch.Tensor) -> type[Operations]:
    """The operations for a tensor like x on a GPU: the modulated norm by Triton, the rest as without it."""
    compiled = kernels.implementation(x) is kernels.InductorKernels
    return _TritonNormAndInductor if compiled else _TritonNorm
