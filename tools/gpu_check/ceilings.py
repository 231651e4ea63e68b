"""Peak rates of the hardware and its libraries on the shapes of a decoder block, alone, by the time of their kernels.

Products of a block in bfloat16 and fp8 (forward, gradient of the input, gradient of the weight; random data: zeros draw
less power and run faster), attention forward and backward at the longest bucket's keys by each kernel, and a copy in
memory.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.gpu_check.items import Item, NotMeasured, Settings, Turn, Values
from tools.gpu_check.measuring import profiled, tflops
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.errors import failure_state

_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _sizes(settings: Settings) -> tuple[int, int, int]:
    """(samples, frames, keys)."""
    return (2, 32, 48) if settings.tiny else (32, 768, 768 + 192 + 96)


def _product(dtype: str, m: int, k: int, n: int, device: str) -> Callable[[], torch.Tensor]:
    """(m, k) by (k, n). In fp8 with a scale a row of either operand ("rowwise"); casting is not in it."""
    a, b = (torch.randn(shape, device=device).bfloat16() for shape in ((m, k), (n, k)))
    if dtype == "bf16":
        return lambda: a @ b.T
    if device == "cpu" or torch.cuda.get_device_capability() < (8, 9):
        raise NotMeasured("fp8 products need a GPU that has them")
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    scales = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    return lambda: torch._scaled_mm(a, b.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def products(flavor: str, dtype: str, settings: Settings, turn: Turn) -> Values:
    """TFLOP/s of each product in its three directions, and of all together as a block has them."""
    samples, frames, _ = _sizes(settings)
    rows, D, M = samples * frames, model_flavors()[flavor].dim, model_flavors()[flavor].mlp_dim
    flops, work = {}, {}
    for name, (k, n) in {
        "qkv_gate": (D, 4 * D),
        "out": (D, D),
        "gate_and_up": (D, 2 * M),
        "down": (M, D),
    }.items():
        ways = {"forward": (rows, k, n), "input": (rows, n, k), "weight": (n, rows, k)}
        for way, shape in ways.items():
            flops[f"{name}_{way}_tflops"] = 2.0 * rows * k * n
            work[f"{name}_{way}_tflops"] = _product(dtype, *shape, settings.device)
    turn()
    took = {n: profiled(w, settings.device)["ms_of_kernels"] for n, w in work.items()}
    together = profiled(lambda: [each() for each in work.values()], settings.device)
    return {
        "tflops": tflops(sum(flops.values()), sum(took.values())),
        "tflops_one_after_another": tflops(sum(flops.values()), together["ms_of_kernels"]),
        **{name: tflops(flops[name], ms) for name, ms in took.items()},
    }


def attention(flavor: str, settings: Settings, turn: Turn) -> Values:
    """TFLOP/s forward and backward of each kernel, without a mask and with one; the reason of one that refuses the
    device, dtype, shape or mask."""
    samples, frames, keys = _sizes(settings)
    args, values = model_flavors()[flavor], {}

    def heads(length: int) -> torch.Tensor:
        shape = samples, length, args.n_heads, args.dim // args.n_heads
        return torch.randn(shape, device=settings.device).bfloat16().transpose(1, 2)

    gradient = heads(frames)
    q, k, v = (heads(length).requires_grad_() for length in (frames, keys, keys))
    mask = torch.zeros(samples, 1, 1, keys, device=settings.device, dtype=q.dtype)
    mask[..., -8:] = float("-inf")

    def both(backend: SDPBackend, given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
        return torch.autograd.grad(out, (q, k, v), gradient)

    turn()
    for name, backend in _KERNELS.items():
        for said, given in ((name, None), (f"{name}_masked", mask)):
            try:
                both(backend, given)
                took = profiled(partial(both, backend, given), settings.device)["ms_of_kernels"]
                values[f"{said}_tflops"] = tflops(12.0 * samples * frames * keys * args.dim, took)
            except RuntimeError as error:
                if isinstance(error, torch.AcceleratorError) or failure_state(error) == "oom":
                    raise  # the kernel was taken, and broke
                values[said] = (str(error).strip().splitlines() or ["no reason given"])[0][:60]
    return values


def memory(settings: Settings, turn: Turn) -> Values:
    """GB/s of a copy, reading and writing together, of arrays far larger than any cache."""
    n = (1 << 20) if settings.tiny else (1 << 29)
    a, out = (torch.randn(n, device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    turn()
    milliseconds = profiled(lambda: out.copy_(a), settings.device)["ms_of_kernels"]
    return {"gb_per_second": 2 * a.nbytes / milliseconds / 1e6}


def items(settings: Settings) -> list[Item]:
    listed = [Item("ceilings", "memory copy", partial(memory, settings))]
    for flavor in settings.flavors:
        for dtype in ("bf16", "fp8"):
            measure = partial(products, flavor, dtype, settings)
            listed.append(Item("ceilings", f"{flavor} products {dtype}", measure))
        listed.append(Item("ceilings", f"{flavor} attention", partial(attention, flavor, settings)))
    return listed
