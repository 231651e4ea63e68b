"""Gates over one decoder block of the 800M flavor: bytes and kernels, and bytes kept for the backward pass.

The block runs forward and backward in bfloat16 on the CPU with the inputs that the model gives it at
full length: compiled as the flavor's config has it (its memory budget), and without a budget; eager;
and eager as the plain Echo-style block of `echo_style.py`. The gates compare the first with the last: a
block that nobody has arranged for speed does not move when ours gets better.

- Moved bytes: see `traffic.py`; in our eager block `F.rms_norm` counts as one kernel.
- Kept bytes: storages that autograd packs for the backward pass, each once, without parameters and without
  what all blocks share. One method for all.
"""

import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from benchmarks.speed import echo_style
from benchmarks.speed.cases import FULL_LENGTH, Outcome, random_batch, randomize
from benchmarks.speed.traffic import CompiledTraffic, OneKernelNorms, PointwiseTraffic
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.infra.compile import compile_options
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

LEAST_TRAFFIC_RATIO = 4.5
LEAST_SAVING = 0.40
SAMPLES = 2

# Relative, of the whole output: bfloat16 rounds at 2^-8, eager at other places than compiled.
_MOST_ERROR = 0.02
_CONFIG = Path(__file__).resolve().parents[2] / "train_configs/dit_tts_800m.toml"

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A block and the arguments that it is called with."""


def _args() -> DiTTTSModelArgs:
    # As on a GPU: on a CPU, attention in bfloat16 is matmuls.
    return replace(model_flavors()["800M"], n_layers=1, speaker_n_layers=1, attention="sdpa")


def _memory_budget() -> float:
    """The 800M config's, of what the compiler may keep."""
    return float(tomllib.loads(_CONFIG.read_text())["activation_checkpoint"]["memory_budget"])


@cache
def first_block() -> Call:
    """The first block of the 800M flavor, in bfloat16, and the arguments that the model calls it with."""
    args = _args()
    model = DiTTTSModel(args)
    randomize(model.parameters())
    model.bfloat16()
    [block] = model.layers
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        caught.append((given, options))

    hook = block.register_forward_pre_hook(catch, with_kwargs=True)
    with torch.no_grad():
        model(**random_batch(args, SAMPLES, FULL_LENGTH, padded=False))
    hook.remove()
    [(given, options)] = caught
    return block, given, options


@cache
def echo_style_block() -> Call:
    """The Echo-style block of the same sizes, with random arguments of the same shapes."""
    args = _args()
    block = echo_style.Block(args)
    randomize(block.parameters())
    generator = torch.Generator().manual_seed(0)
    T, L = FULL_LENGTH.frames, FULL_LENGTH.text_tokens
    P = FULL_LENGTH.speaker_frames // args.speaker_patch_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.bfloat16)

    given = (
        random(T, args.dim),
        random(3 * args.dim),
        echo_style.rotations(T, args.dim // args.n_heads, args.rope_theta),
        torch.ones(SAMPLES, 1, T, T + L + P, dtype=torch.bool),
        random(L, args.speaker_dim),
        random(P, args.speaker_dim),
    )
    return block.bfloat16(), given, {}


def _fresh(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The block's arguments; those that training has gradients of ask for them."""
    _, given, options = call

    def fresh(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            return value.detach().clone().requires_grad_()
        return value

    return tuple(map(fresh, given)), {name: fresh(value) for name, value in options.items()}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors among these values and in the fields of dataclasses, such as the attention's keys."""
    for value in tree_iter(values):
        if is_dataclass(value):
            yield from _tensors([getattr(value, field.name) for field in fields(value)])
        elif isinstance(value, torch.Tensor):
            yield value


def _kept_bytes(call: Call, run: Callable[..., torch.Tensor]) -> tuple[int, torch.Tensor]:
    """(bytes per sample that a block's forward pass keeps, its output)."""
    given, options = _fresh(call)
    # Of the inputs only x, the first, is this block's own: the others are the same for all blocks.
    shared = [*call[0].parameters(), *_tensors((given[1:], options))]
    known = {x.untyped_storage()._cdata for x in shared}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(*given, **options)
    return sum(storage.nbytes() for storage in kept.values()) // SAMPLES, out


def _eager(call: Call, one_kernel_norms: bool) -> dict[str, Any]:
    """Traffic, kernels and kept bytes of a block run eagerly."""
    kept, _ = _kept_bytes(call, call[0])
    traffic = PointwiseTraffic()
    given, options = _fresh(call)
    call[0].zero_grad()
    with traffic, OneKernelNorms(traffic) if one_kernel_norms else nullcontext():
        call[0](*given, **options).sum().backward()
    return {"bytes": traffic.bytes, "kernels": traffic.kernels, "kept_bytes_a_sample": kept}


def _compiled(call: Call, budget: float) -> dict[str, Any]:
    """The same of the block compiled with a memory budget, and its distance from the eager one."""
    torch._dynamo.reset()
    traffic = CompiledTraffic()
    with traffic.watch(), torch._functorch.config.patch(activation_memory_budget=budget):
        options = compile_options("default")
        run = torch.compile(call[0], options=options, fullgraph=True, dynamic=False)
        kept, out = _kept_bytes(call, run)
        out.sum().backward()
    torch._dynamo.reset()
    given, options = _fresh(call)
    with torch.no_grad():
        expected = call[0](*given, **options).float()
    error = float((out.detach().float() - expected).norm() / expected.norm())
    if not error <= _MOST_ERROR:
        raise AssertionError(f"the compiled block is {error:.3f} away from the eager one")
    return {
        "bytes": traffic.bytes,
        "kernels": traffic.kernels,
        "kept_bytes_a_sample": kept,
        "memory_budget": budget,
        "relative_error_to_eager": error,
    }


@cache
def measure() -> dict[str, Any]:
    """Traffic, kernels and kept bytes of the blocks."""
    ours, echo = first_block(), echo_style_block()
    return {
        "samples": SAMPLES,
        "compiled": _compiled(ours, _memory_budget()),
        "compiled, no memory budget": _compiled(ours, 1.0),
        "eager": _eager(ours, one_kernel_norms=True),
        "eager Echo-style": _eager(echo, one_kernel_norms=False),
    }


def _others(found: dict[str, Any], say: Callable[[dict[str, Any]], str]) -> str:
    names = ("compiled, no memory budget", "eager")
    return "; ".join(f"{say(found[name])} {name}" for name in names)


def traffic() -> Outcome:
    """Bytes and kernels of a block beside its products and attention."""
    found = measure()
    echo, compiled = found["eager Echo-style"], found["compiled"]
    ratio = echo["bytes"] / compiled["bytes"]

    def say(each: dict[str, Any]) -> str:
        return f"{each['bytes'] / 2**20:.0f} MiB in {each['kernels']} kernels"

    return Outcome(
        ratio >= LEAST_TRAFFIC_RATIO,
        f"at least {LEAST_TRAFFIC_RATIO} times fewer pointwise bytes than the eager Echo-style block",
        f"{ratio:.2f} times: {say(echo)} to {say(compiled)} ({_others(found, say)})",
        found,
    )


def kept() -> Outcome:
    """Bytes that a block keeps for its backward pass."""
    found = measure()
    echo, compiled = found["eager Echo-style"], found["compiled"]
    saving = 1 - compiled["kept_bytes_a_sample"] / echo["kept_bytes_a_sample"]

    def say(each: dict[str, Any]) -> str:
        return f"{each['kept_bytes_a_sample'] / 2**20:.1f} MiB"

    return Outcome(
        saving >= LEAST_SAVING,
        f"at least {LEAST_SAVING:.0%} fewer bytes kept per sample than the eager Echo-style block",
        f"-{saving:.1%} a sample and block: {say(echo)} to {say(compiled)} ({_others(found, say)})",
        found,
    )
