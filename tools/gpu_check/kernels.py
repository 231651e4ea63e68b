"""Throughput of the kernels of a decoder block, by the time that the device is busy with them.

- A block forward and backward at the longest bucket, in each mode. Nothing is padded or dropped; FLOPs are the exact ones
  of `model/flops.py`, without recomputation.
- Ceilings on the shapes of a block: its products in bfloat16 and fp8 (random data: zeros draw less power and run faster),
  attention by each kernel, and a copy in memory.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.gpu_check import models
from tools.gpu_check.measuring import profiled
from tools.gpu_check.supervisor import Item, NotMeasured, Settings, Turn, Values
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.infra.compile import compile_for_any_lengths
from torchtitan.models.dit_tts.infra.cuda_graphs import record_passes
from torchtitan.models.dit_tts.model.attention_backends import MaskedKeys, prepare_keys
from torchtitan.models.dit_tts.model.flops import Lengths, forward_flops
from torchtitan.models.dit_tts.model.layers import rope_table
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.speech.sampling.sampler import SpeechRequest, generate_latents

NO_MASK = ", no mask"
SHAPE = (32, 768, 192, 96)  # samples, frames, text tokens, patches of the reference


def _shape(settings: Settings) -> tuple[int, int, int, int]:
    return (2, 48, 16, 8) if settings.tiny else SHAPE


def block_inputs(
    model: DiTTTSModel,
    shape: tuple[int, ...],
    device: str = "cpu",
    masked: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:
    """Inputs of each block for a batch of full length, in the precision of autocast; `masked`
    attention, although no key is hidden."""
    args, (samples, frames, text, patches) = model.args, shape

    def given(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device=device, requires_grad=True)

    valid = torch.ones(samples, frames + text + patches, dtype=torch.bool, device=device)
    keys = prepare_keys(args.attention, valid, frames, dtype)
    if not masked:
        keys = cast(MaskedKeys, keys)._replace(mask=None)
    positions = torch.arange(frames, device=device).float()
    return (
        given(samples, frames, args.dim),
        given(samples, 3, args.dim),
        rope_table(positions, args.dim // args.n_heads, args.rope_theta, model.rotated),
        keys,
        given(samples, text, args.text_key_dim),
        given(samples, patches, args.speaker_dim),
    )


def block(flavor: str, mode: str, settings: Settings, turn: Turn) -> Values:
    shape = samples, frames, text, patches = _shape(settings)
    args, device = replace(model_flavors()[flavor], n_layers=1), settings.device
    lengths = Lengths(frames, text, patches * args.speaker_patch_size)
    one, none = (forward_flops(replace(args, n_layers=n), lengths) for n in (1, 0))
    keys = mode.removesuffix(NO_MASK)
    with models.built(args, keys, device, models.random_weights(args)) as model:
        inputs = block_inputs(model, shape, device, masked=keys == mode)
        own = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        differentiated = [*own, *model.layers[0].parameters()]

        def both() -> None:
            with torch.autocast(device, torch.bfloat16):
                out = model.layers[0](*inputs)
            # Not backward(): gradients that stay with the inputs are added to, which is traffic of its own,
            # and lie in memory that the next replay of a CUDA graph writes to.
            torch.autograd.grad(out, differentiated, out.detach())

        for _ in range(1 if settings.tiny else 4):
            both()
        turn()
        found = profiled(both, device, repeats=1 if settings.tiny else 5)
    return {"tflops": 3e-9 * samples * (one - none) / found["ms_of_kernels"], **found}


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
    samples, frames, *_ = _shape(settings)
    rows, D, M = samples * frames, model_flavors()[flavor].dim, model_flavors()[flavor].mlp_dim
    tera, work = {}, {}
    shapes = {"qkv_gate": (D, 4 * D), "out": (D, D), "gate_and_up": (D, 2 * M), "down": (M, D)}
    for name, (k, n) in shapes.items():
        ways = {"forward": (rows, k, n), "input": (rows, n, k), "weight": (n, rows, k)}
        for way, shape in ways.items():
            tera[f"{name}_{way}_tflops"] = 2e-12 * rows * k * n
            work[f"{name}_{way}_tflops"] = _product(dtype, *shape, settings.device)
    turn()
    took = {n: profiled(w, settings.device)["ms_of_kernels"] for n, w in work.items()}
    together = profiled(lambda: [each() for each in work.values()], settings.device)
    return {
        "tflops": sum(tera.values()) / sum(took.values()) * 1e3,
        "tflops_one_after_another": sum(tera.values()) / together["ms_of_kernels"] * 1e3,
        **{name: tera[name] / ms * 1e3 for name, ms in took.items()},
    }


def attention(flavor: str, settings: Settings, turn: Turn) -> Values:
    """TFLOP/s forward and backward of each kernel, without a mask and with one; the reason of one that refuses the
    device, dtype, shape or mask."""
    samples, frames, *others = _shape(settings)
    args, keys, values = model_flavors()[flavor], frames + sum(others), {}

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
    for name in ("cudnn", "flash", "efficient"):
        backend = getattr(SDPBackend, f"{name.upper()}_ATTENTION")
        for said, given in ((name, None), (f"{name}_masked", mask)):
            try:
                both(backend, given)
                took = profiled(partial(both, backend, given), settings.device)["ms_of_kernels"]
                values[f"{said}_tflops"] = 12e-9 * samples * frames * keys * args.dim / took
            except RuntimeError as error:
                values[said] = (str(error).strip().splitlines() or ["no reason given"])[0][:60]
    return values


def memory(settings: Settings, turn: Turn) -> Values:
    """GB/s of a copy, reading and writing together, of arrays far larger than any cache."""
    n = (1 << 20) if settings.tiny else (1 << 29)
    a, out = (torch.randn(n, device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    turn()
    milliseconds = profiled(lambda: out.copy_(a), settings.device)["ms_of_kernels"]
    return {"gb_per_second": 2 * a.nbytes / milliseconds / 1e6}


def network(flavor: str, how: str, settings: Settings, turn: Turn) -> Values:
    """Milliseconds of a sampler's 40 guided passes for one text of ten seconds, in bfloat16."""
    args, device = model_flavors()[flavor], torch.device(settings.device)
    guidance = Sampling(steps=2 if settings.tiny else 40, speaker_scale=3.0)
    with models.built(args, "eager", settings.device, models.random_weights(args)) as model:
        model.bfloat16().eval()
        if how in ("default", "reduce-overhead"):
            compile_for_any_lengths(model)
        if how in ("graphs", "reduce-overhead"):
            record_passes(model)
        features = torch.randn(1, 150, args.text_dim, device=device).bfloat16()
        tokenizer: Any = SimpleNamespace(encode=lambda *_: [0] * 150, aligner=None)
        request = SpeechRequest("", torch.randn(300, args.latent_channels), 250)
        given = model, tokenizer, FlowMatching(), [request], guidance, 0, device
        speak = partial(generate_latents, *given, text_encoder=cast(Any, lambda *_: features))

        for _ in range(2):
            speak()
        turn()
        return profiled(speak, settings.device, repeats=3)


def sampling(settings: Settings) -> list[Item]:
    ways = ("off",) if settings.tiny else ("off", "graphs", "default", "reduce-overhead")
    return [
        Item(f"{flavor} sampling, --compile {how}", partial(network, flavor, how, settings))
        for flavor in settings.flavors
        for how in ways
    ]


def ceilings(settings: Settings) -> list[Item]:
    listed = [Item("memory copy", partial(memory, settings))]
    for flavor in settings.flavors:
        for dtype in ("bf16", "fp8"):
            found = partial(products, flavor, dtype, settings)
            listed.append(Item(f"{flavor} products {dtype}", found))
        listed.append(Item(f"{flavor} attention", partial(attention, flavor, settings)))
    return listed


def blocks(settings: Settings) -> list[Item]:
    compiled, own, options, *others = models.COMPILED
    modes = [compiled, compiled + NO_MASK, own + NO_MASK, own, options, "eager", *others]
    modes += ["eager, own norm", *models.ENGINE]
    if settings.tiny:
        modes = [compiled, compiled + NO_MASK, models.EAGER[1], own]
    return [
        Item(f"{flavor} block, {mode}", partial(block, flavor, mode, settings))
        for flavor in settings.flavors
        for mode in modes
    ]
