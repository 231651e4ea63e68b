"""Stage: what the hardware and its libraries reach on the shapes of a decoder block, alone.

Products of a block in bfloat16 and fp8 (forward, gradient of the input, gradient of the weight; random
data: zeros draw less power and run faster), attention forward and backward at the longest bucket's keys
by each kernel, and a copy and a sum in memory. Between a step and these lie pointwise kernels, launches
and the optimizer.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from tools.gpu_check.items import Item, NotMeasured, Values, is_out_of_memory
from tools.gpu_check.measuring import tflops, timed
from tools.gpu_check.settings import Settings
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs

_FRAMES, _TEXT, _SPEAKER = 768, 192, 96
"""of the longest bucket: queries, and keys of text and speaker"""

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def _products(args: DiTTTSModelArgs) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the block's products over all frames."""
    return {
        "qkv_gate": (args.dim, 4 * args.dim),
        "out": (args.dim, args.dim),
        "gate_and_up": (args.dim, 2 * args.mlp_dim),
        "down": (args.mlp_dim, args.dim),
    }


def _bf16(rows: int, inner: int, columns: int, device: str) -> Callable[[], torch.Tensor]:
    a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    b = torch.randn(columns, inner, device=device, dtype=torch.bfloat16)
    return lambda: a @ b.T


def _fp8(rows: int, inner: int, columns: int, device: str) -> Callable[[], torch.Tensor]:
    """A scale a row of either operand, as the recipe "rowwise" has it; casting is not in it."""
    if device == "cpu":
        raise NotMeasured("fp8 products need a GPU")
    if torch.cuda.get_device_capability() < (8, 9):
        raise NotMeasured("this GPU has no fp8")
    a = torch.randn(rows, inner, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(columns, inner, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device)
    return lambda: torch._scaled_mm(a, b.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def products(
    args: DiTTTSModelArgs, make: Callable[..., Callable[[], torch.Tensor]], settings: Settings
) -> Values:
    """TFLOP/s of each product in its three directions, and of all together as a block has them."""
    rows = _samples(settings) * _frames(settings)
    values: Values = {}
    flops = milliseconds = 0.0
    for name, (inputs, outputs) in _products(args).items():
        directions = {
            "forward": (rows, inputs, outputs),
            "input_gradient": (rows, outputs, inputs),
            "weight_gradient": (outputs, rows, inputs),
        }
        for direction, shape in directions.items():
            took = timed(make(*shape, settings.device), settings.device, _seconds(settings))
            operations = 2.0 * shape[0] * shape[1] * shape[2]
            values[f"{name}_{direction}_tflops"] = tflops(operations, took["ms_median"])
            flops += operations
            milliseconds += took["ms_median"]
    return {"tflops": tflops(flops, milliseconds), "ms_all": milliseconds, "rows": rows, **values}


def _samples(settings: Settings) -> int:
    return 2 if settings.tiny else 32


def _frames(settings: Settings) -> int:
    return 32 if settings.tiny else _FRAMES


def _seconds(settings: Settings) -> float:
    return 0.02 if settings.tiny else 0.15


def attention(
    args: DiTTTSModelArgs,
    kernel: Callable[..., torch.Tensor],
    masked: bool,
    settings: Settings,
) -> Values:
    """TFLOP/s of attention, forward alone and with its backward pass, which counts as two forwards (a
    flash kernel does half a forward more, computing the scores again).

    Args:
        kernel: of q, k, v (B, H, L, K), which lie in memory as the model has them, (B, L, H, K), and a
            mask (B, 1, 1, keys) or None.
    """
    samples, frames = _samples(settings), _frames(settings)
    keys = frames + _TEXT + _SPEAKER
    head_dim = args.dim // args.n_heads

    def heads(length: int) -> torch.Tensor:
        x = torch.randn(samples, length, args.n_heads, head_dim, device=settings.device)
        return x.bfloat16().transpose(1, 2)

    gradient = heads(frames)
    q, k, v = (heads(length).requires_grad_() for length in (frames, keys, keys))
    mask = None
    if masked:
        mask = torch.zeros(samples, 1, 1, keys, device=settings.device, dtype=q.dtype)
        mask[..., -8:] = float("-inf")

    def forward() -> torch.Tensor:
        return kernel(q, k, v, mask)

    def both() -> tuple[torch.Tensor, ...]:
        # Not backward(): gradients that stay are added to, which is traffic of its own.
        return torch.autograd.grad(forward(), (q, k, v), gradient)

    with torch.no_grad():
        alone = timed(forward, settings.device, _seconds(settings))
    together = timed(both, settings.device, _seconds(settings))
    flops = 4.0 * samples * frames * keys * args.dim
    return {
        "forward_tflops": tflops(flops, alone["ms_median"]),
        "tflops": tflops(3 * flops, together["ms_median"]),
        "ms_forward": alone["ms_median"],
        **together,
        "keys": keys,
    }


def forced(args: DiTTTSModelArgs, backend: SDPBackend, masked: bool, settings: Settings) -> Values:
    """`attention` by one of PyTorch's kernels, which may refuse the device, dtype, shape or mask, each
    library in its own words: that is not measured, and no failure."""
    try:
        return attention(args, partial(_sdpa, backend), masked, settings)
    except torch.AcceleratorError:
        raise  # the kernel was taken, and broke
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise NotMeasured((str(error).strip().splitlines() or ["no reason given"])[0]) from error


def _sdpa(backend: SDPBackend, q, k, v, mask) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _varlen(q, k, v, mask) -> torch.Tensor:
    """Whole samples as segments: the packed kernel without the packing."""
    if q.device.type == "cpu":
        raise NotMeasured("the packed kernel needs a GPU")
    from torch.nn.attention.varlen import varlen_attn

    samples, _, frames, _ = q.shape
    keys = k.shape[2]
    starts = torch.arange(samples + 1, device=q.device, dtype=torch.int32)
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(*packed, starts * frames, starts * keys, frames, keys)
    return out.unflatten(0, (samples, frames)).transpose(1, 2)


def _flex(compiled: Callable[..., torch.Tensor], q, k, v, mask) -> torch.Tensor:
    if q.device.type == "cpu":
        raise NotMeasured("flex attention goes backward on a GPU only")
    return compiled(q, k, v)


def memory(kind: str, settings: Settings) -> Values:
    """GB/s of reading and writing together, from arrays far larger than any cache."""
    n = (1 << 22) if settings.tiny else (1 << 29)
    a, b, out = (torch.randn(n, device=settings.device, dtype=torch.bfloat16) for _ in range(3))
    work, streams = {
        "copy": (lambda: out.copy_(a), 2),
        "sum": (lambda: torch.add(a, b, out=out), 3),
    }[kind]
    took = timed(work, settings.device, _seconds(settings))
    return {"gb_per_second": streams * a.nbytes / took["ms_median"] / 1e6, **took}


def items(settings: Settings) -> list[Item]:
    flavors = model_flavors()
    listed = [Item(f"memory {kind}", partial(memory, kind, settings)) for kind in ("copy", "sum")]
    for flavor in settings.flavors:
        args = flavors[flavor]
        for name, make in (("bf16", _bf16), ("fp8", _fp8)):
            listed.append(
                Item(f"{flavor} products {name}", partial(products, args, make, settings))
            )
        flex = torch.compile(flex_attention, dynamic=False)  # the sizes have other heads
        measures = {
            f"sdpa {name}{' masked' if masked else ''}": partial(
                forced, args, backend, masked, settings
            )
            for name, backend in _KERNELS.items()
            for masked in (False, True)
        }
        measures["varlen"] = partial(attention, args, _varlen, False, settings)
        measures["flex"] = partial(attention, args, partial(_flex, flex), False, settings)
        listed += [
            Item(f"{flavor} attention {name}", measure) for name, measure in measures.items()
        ]
    return listed
