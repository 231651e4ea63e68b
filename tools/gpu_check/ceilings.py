"""What the hardware and its libraries reach on the shapes of a decoder block, alone, by the time of their kernels.

Products of a block in bfloat16 and fp8 (forward, gradient of the input, gradient of the weight; random data: zeros draw
less power and run faster), attention forward and backward at the longest bucket's keys by each kernel, and a copy in
memory.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.gpu_check.items import Item, NotMeasured, Turn, Values
from tools.gpu_check.measuring import profiled, tflops
from tools.gpu_check.settings import Settings
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.errors import failure_state
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs

_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _sizes(settings: Settings) -> tuple[int, int, int]:
    """(samples, frames, keys)."""
    return (2, 32, 48) if settings.tiny else (32, 768, 768 + 192 + 96)


def _bf16(rows: int, inner: int, columns: int, device: str) -> Callable[[], torch.Tensor]:
    a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    b = torch.randn(columns, inner, device=device, dtype=torch.bfloat16)
    return lambda: a @ b.T


def _fp8(rows: int, inner: int, columns: int, device: str) -> Callable[[], torch.Tensor]:
    """A scale a row of either operand, as the recipe "rowwise" has it; casting is not in it."""
    if device == "cpu" or torch.cuda.get_device_capability() < (8, 9):
        raise NotMeasured("fp8 products need a GPU that has them")
    a = torch.randn(rows, inner, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(columns, inner, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device)
    return lambda: torch._scaled_mm(a, b.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def products(
    args: DiTTTSModelArgs, make: Callable[..., Callable[[], object]], settings: Settings, turn: Turn
) -> Values:
    """TFLOP/s of each product in its three directions, and of all together as a block has them."""
    samples, frames, _ = _sizes(settings)
    rows, D, M = samples * frames, args.dim, args.mlp_dim
    shapes = {"qkv_gate": (D, 4 * D), "out": (D, D), "gate_and_up": (D, 2 * M), "down": (M, D)}
    work: dict[str, tuple[float, Callable[[], object]]] = {}
    for name, (inputs, outputs) in shapes.items():
        for direction, shape in {
            "forward": (rows, inputs, outputs),
            "input_gradient": (rows, outputs, inputs),
            "weight_gradient": (outputs, rows, inputs),
        }.items():
            flops = 2.0 * shape[0] * shape[1] * shape[2]
            work[f"{name}_{direction}_tflops"] = flops, make(*shape, settings.device)
    turn()
    found = {
        name: (flops, profiled(product, settings.device)["ms_of_kernels"])
        for name, (flops, product) in work.items()
    }
    together = profiled(lambda: [product() for _, product in work.values()], settings.device)
    every = sum(flops for flops, _ in found.values())
    return {
        "tflops": tflops(every, sum(ms for _, ms in found.values())),
        "tflops_one_after_another": tflops(every, together["ms_of_kernels"]),
        **{name: tflops(flops, ms) for name, (flops, ms) in found.items()},
    }


def attention(args: DiTTTSModelArgs, settings: Settings, turn: Turn) -> Values:
    """TFLOP/s forward and backward of each kernel, without a mask and with one; the reason of one that refuses the
    device, dtype, shape or mask."""
    samples, frames, keys = _sizes(settings)

    def heads(length: int) -> torch.Tensor:
        shape = samples, length, args.n_heads, args.dim // args.n_heads
        return torch.randn(shape, device=settings.device).bfloat16().transpose(1, 2)

    gradient = heads(frames)
    q, k, v = (heads(length).requires_grad_() for length in (frames, keys, keys))
    mask = torch.zeros(samples, 1, 1, keys, device=settings.device, dtype=q.dtype)
    mask[..., -8:] = float("-inf")
    flops = 3 * 4.0 * samples * frames * keys * args.dim
    turn()
    values: Values = {}
    for name, backend in _KERNELS.items():
        for said, given in (("", None), ("_masked", mask)):

            def both(backend=backend, given=given) -> tuple[torch.Tensor, ...]:
                with sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
                return torch.autograd.grad(out, (q, k, v), gradient)

            try:
                both()
                took = profiled(both, settings.device)["ms_of_kernels"]
                values[f"{name}{said}_tflops"] = tflops(flops, took)
            except RuntimeError as error:
                if isinstance(error, torch.AcceleratorError) or failure_state(error) == "oom":
                    raise  # the kernel was taken, and broke
                refused = (str(error).strip().splitlines() or ["no reason given"])[0]
                values[f"{name}{said}"] = refused[:60]
    return values


def memory(settings: Settings, turn: Turn) -> Values:
    """GB/s of a copy, reading and writing together, of arrays far larger than any cache."""
    n = (1 << 20) if settings.tiny else (1 << 29)
    a, out = (torch.randn(n, device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    out.copy_(a)
    turn()
    milliseconds = profiled(lambda: out.copy_(a), settings.device)["ms_of_kernels"]
    return {"gb_per_second": 2 * a.nbytes / milliseconds / 1e6}


def items(settings: Settings) -> list[Item]:
    listed = [("memory copy", partial(memory, settings))]
    for flavor in settings.flavors:
        args = model_flavors()[flavor]
        for name, make in (("bf16", _bf16), ("fp8", _fp8)):
            listed.append((f"{flavor} products {name}", partial(products, args, make, settings)))
        listed.append((f"{flavor} attention", partial(attention, args, settings)))
    return [Item("ceilings", name, measure, 6.0) for name, measure in listed]
