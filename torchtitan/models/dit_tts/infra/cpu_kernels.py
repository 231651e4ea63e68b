"""The model's operations for eager mode on a CPU, with backward passes by hand.

Each is one autograd function that works in place and keeps little more than its input, where the definitions
read and write whole activations in float32. They compute in float32, or float64 for such an input; results have
the dtype of the input. Samples that are packed in one row are scaled and gated by the definitions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from torchtitan.models.dit_tts.model.operations import Operations, upcast
from torchtitan.models.dit_tts.streams import Stream


def multiplies_bfloat16(device: torch.device) -> bool:
    """True if bfloat16 is the faster precision: on an accelerator, and on a CPU whose CPUID lists AVX512-BF16 or AMX
    (and whose system lets it be used)."""
    cpu = torch.cpu
    return device.type != "cpu" or cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / √(mean of x² + eps) over the last dimension, which keeps length 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x·factor in the dtype of computation, in new memory."""
    y = upcast(x)
    return x * factor if y is x else y.mul_(factor)


def _norm_backward(
    gradient: torch.Tensor, normed: torch.Tensor, inverse: torch.Tensor, product: torch.Tensor
) -> torch.Tensor:
    """The gradient of x for y = x·inverse, from y's `gradient` and `product` = gradient·normed; overwrites
    both."""
    mean = product.sum(-1, keepdim=True).div_(-gradient.shape[-1])
    return gradient.addcmul_(normed, mean).mul_(inverse)


class _ScaledNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        y = upcast(x)
        inverse = _inverse_rms(y, eps)
        ctx.save_for_backward(x, scale, inverse, shift)
        y = x * inverse if y is x else y.mul_(inverse)
        scale = upcast(scale)
        if shift is None:
            return y.mul_(scale).to(x.dtype)
        return torch.addcmul(upcast(shift), y, scale, out=y).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        x, scale, inverse, shift = ctx.saved_tensors
        gradient = upcast(gradient)
        d_shift = None if shift is None else gradient.sum_to_size(shift.shape).to(shift.dtype)
        normed = _scaled(x, inverse)
        product = gradient * normed
        # The sum of one position is the product itself, which is overwritten below.
        d_scale = product.sum_to_size(scale.shape).clone().to(scale.dtype)
        scale = upcast(scale)
        d_x = _norm_backward(gradient * scale, normed, inverse, product.mul_(scale))
        return d_x.to(x.dtype), d_scale, d_shift, None


def _empty_upcast(x: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for x in the dtype of computation."""
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _rotate(x: torch.Tensor, rope: torch.Tensor, sign: int) -> None:
    """Rotates x (B, L, H, N, K) in place, forwards or (sign -1) back; rope is a `rope_table`."""
    grouped = x.unflatten(2, (rope.shape[-3], -1))
    (first, second), half = grouped.chunk(2, dim=-1), x.shape[-1] // 2
    cos, sin = rope[0, ..., None, :half], rope[1, ..., None, half:]
    before = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-sign)
    second.mul_(cos).addcmul_(before, sin, value=sign)


class _NormedHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, rope: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        count = weight.shape[1]
        y = _empty_upcast(x[..., :count, :]).copy_(x[..., :count, :])
        inverse = _inverse_rms(y, eps)
        y.mul_(inverse).mul_(weight)
        if rope is not None:
            _rotate(y, rope, 1)
        ctx.save_for_backward(x, weight, rope, inverse)
        return *y.to(x.dtype).unbind(-2), *x[..., count:, :].unbind(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor):  # type: ignore[override]
        x, weight, rope, inverse = ctx.saved_tensors
        count = weight.shape[1]
        d_x = torch.empty_like(x)
        for part, gradient in enumerate(gradients[count:], count):
            d_x[..., part, :] = gradient
        d_y = _empty_upcast(x[..., :count, :])
        for part, gradient in enumerate(gradients[:count]):
            d_y[..., part, :] = gradient
        if rope is not None:
            _rotate(d_y, rope, -1)
        normed = _scaled(x[..., :count, :], inverse)
        product = d_y * normed
        d_weight = product.sum((0, 1)).to(weight.dtype)
        d_x[..., :count, :] = _norm_backward(
            d_y.mul_(weight), normed, inverse, product.mul_(weight)
        )
        return d_x, d_weight, None, None


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.unbind(-2)
        # Copied first: elements after the last full vector of a row are computed one by one.
        active = F.silu(gate.clone(memory_format=torch.contiguous_format), inplace=True)
        if not ctx.needs_input_grad[0]:
            return active.mul_(up)
        ctx.save_for_backward(x, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        x, active = ctx.saved_tensors
        gate, up = x.unbind(-2)
        d_x = torch.empty_like(x)
        torch.mul(gradient, active, out=d_x[..., 1, :])
        d_x[..., 0, :] = torch.ops.aten.silu_backward(gradient * up, gate.contiguous())
        return d_x


class _SigmoidMul(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        opened = gate.clone(memory_format=torch.contiguous_format).sigmoid_()
        if not any(ctx.needs_input_grad):
            return opened.mul_(x)
        ctx.save_for_backward(x, opened)
        return opened * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        x, opened = ctx.saved_tensors
        return opened * gradient, torch.ops.aten.sigmoid_backward(gradient * x, opened)


class _AddScaled(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, update: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(scale, update)
        return torch.addcmul(x, scale, update)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        scale, update = ctx.saved_tensors
        return gradient, (gradient * update).sum_to_size(scale.shape), gradient * scale


class CPUKernels(Operations):
    @staticmethod
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _ScaledNorm.apply(x, weight, None, eps)

    @staticmethod
    def modulated_norm(
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        packed: Stream | None = None,
    ) -> torch.Tensor:
        if packed is not None:
            return Operations.modulated_norm(x, scale, shift, eps, packed)
        return _ScaledNorm.apply(x, 1 + scale, shift, eps)

    @staticmethod
    def add_gated(
        x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor, packed: Stream | None = None
    ) -> torch.Tensor:
        if packed is not None:
            return Operations.add_gated(x, gate, update, packed)
        return _AddScaled.apply(x, gate, update)

    @staticmethod
    def normed_heads(
        x: torch.Tensor, weights: tuple[torch.Tensor, ...], rope: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        """The parts that are not normed are views of x."""
        return _NormedHeads.apply(x, torch.stack(weights, dim=1), rope, eps)

    silu_mul = staticmethod(_SiluMul.apply)
    sigmoid_mul = staticmethod(_SigmoidMul.apply)
