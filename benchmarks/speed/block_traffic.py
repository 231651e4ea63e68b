"""Gates over one decoder block of the 800M flavor: bytes and kernels, and bytes kept for the backward pass.

The block runs forward and backward in bfloat16 on the CPU with the inputs that the model gives it at
full length, eager and compiled.

- Eager bytes: what each pointwise operation, reduction or copy reads and writes, counted at the
  dispatcher; products, attention and views are left out. RMSNorm counts as the one kernel that it is on a
  GPU, where the CPU takes five.
- Compiled bytes: what Inductor's scheduler says that its kernels read and write, forward and backward;
  kernels of products and attention are left out.
- Kept bytes: storages that autograd packs for the backward pass, each once, without parameters and without
  what all blocks share. One method for both.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.speed.cases import FULL_LENGTH, Outcome, random_batch, randomize
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.model.model import DiTTTSModel

LEAST_TRAFFIC_RATIO = 4.5
LEAST_SAVING = 0.40
SAMPLES = 2

# Relative, of the whole output: bfloat16 rounds at 2^-8, eager at other places than compiled.
_MOST_ERROR = 0.02
_PRODUCTS = ("mm", "bmm", "addmm", "_scaled_dot_product")
_NO_WORK = ("empty", "detach")


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's own elements: those that an expanded one repeats count once."""
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= length if stride else 1
    return elements * tensor.element_size()


class PointwiseTraffic(TorchDispatchMode):
    """Bytes and number of all operations but products, attention and views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.kernels = 0
        self._paused = False

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        self.kernels += 1
        self.bytes += sum(map(bytes_of, tensors))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        yield
        self._paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if self._paused or func.is_view or name.startswith((*_PRODUCTS, *_NO_WORK)):
            return out
        if name == "_unsafe_view":
            return out
        self.add(x for x in tree_iter((args, kwargs, out)) if isinstance(x, torch.Tensor))
        return out


class _OneKernelNorm(torch.autograd.Function):
    """RMSNorm without weight, counted as one kernel forward and one backward, as CUDA has it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, eps: float, traffic: PointwiseTraffic) -> torch.Tensor:
        ctx.traffic = traffic
        with traffic.paused():
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            out = x * scale
        traffic.add([x, scale, out])
        ctx.save_for_backward(x, scale)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        x, scale = ctx.saved_tensors
        with ctx.traffic.paused():
            normed = x * scale
            result = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        ctx.traffic.add([grad, x, scale, result])
        return result, None, None


class OneKernelNorms(TorchFunctionMode):
    """Sends `F.rms_norm` without a weight through `_OneKernelNorm`."""

    def __init__(self, traffic: PointwiseTraffic):
        super().__init__()
        self.traffic = traffic

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.rms_norm:
            x, shape = args
            assert kwargs["weight"] is None and len(shape) == 1
            return _OneKernelNorm.apply(x, kwargs["eps"], self.traffic)
        return func(*args, **kwargs)


@cache
def first_block() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The first block of the 800M flavor, in bfloat16, and the arguments that the model calls it with."""
    args = replace(model_flavors()["800M"], n_layers=1, speaker_n_layers=1)
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


def _fresh_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The block's arguments; those that training has gradients of ask for them."""
    _, given, options = first_block()

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


def _kept_bytes(run: Callable[..., torch.Tensor]) -> tuple[int, torch.Tensor]:
    """(bytes a sample that a block's forward pass keeps, its output)."""
    block, _, _ = first_block()
    given, options = _fresh_inputs()
    # Of the inputs only x, the first, is this block's own: the others are the same for all blocks.
    shared = [*block.parameters(), *_tensors((given[1:], options))]
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


@cache
def measure() -> dict[str, Any]:
    """Traffic, kernels and kept bytes of the block, eager and compiled."""
    from torch._inductor import config as inductor_config
    from torch._inductor import metrics
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    block, _, _ = first_block()
    torch._dynamo.reset()
    kept, expected = _kept_bytes(block)
    traffic, parts = PointwiseTraffic(), PointwiseTraffic()
    for counter, norms in ((traffic, OneKernelNorms(traffic)), (parts, None)):
        given, options = _fresh_inputs()
        with counter:
            if norms is None:
                out = block(*given, **options)
            else:
                with norms:
                    out = block(*given, **options)
            out.sum().backward()
    # The scheduler's bytes are added up only where this logger would say them.
    log = torch._inductor.compile_fx.inductor_metrics_log
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    metrics.reset()
    try:
        with inductor_config.patch(force_disable_caches=True):
            compiled_kept, out = _kept_bytes(torch.compile(block, fullgraph=True, dynamic=False))
            error = (out.float() - expected.float()).norm() / expected.float().norm()
            if error > _MOST_ERROR:
                raise AssertionError(f"the compiled block is {error:.3f} away from the eager one")
            out.sum().backward()
        own = [
            size * 4  # Inductor counts in words
            for node, size in metrics.nodes_num_elem
            if not isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode))
        ]
    finally:
        log.setLevel(level)
        log.propagate = propagate
        torch._dynamo.reset()
    return {
        "samples": SAMPLES,
        "compiled_to_eager_relative_error": float(error),
        "eager": {"bytes": traffic.bytes, "kernels": traffic.kernels, "kept_bytes_a_sample": kept},
        "eager_norms_in_parts": {"bytes": parts.bytes, "kernels": parts.kernels},
        "compiled": {
            "bytes": sum(own),
            "kernels": len(own),
            "kept_bytes_a_sample": compiled_kept,
        },
    }


def traffic() -> Outcome:
    """Bytes and kernels of a block beside its products and attention."""
    found = measure()
    eager, compiled = found["eager"], found["compiled"]
    in_parts = found["eager_norms_in_parts"]
    ratio = eager["bytes"] / compiled["bytes"]
    return Outcome(
        ratio >= LEAST_TRAFFIC_RATIO,
        f"at least {LEAST_TRAFFIC_RATIO} times fewer pointwise bytes than eager",
        f"{ratio:.2f} times ({eager['bytes'] / 2**20:.0f} to {compiled['bytes'] / 2**20:.0f} MiB), "
        f"{eager['kernels']} to {compiled['kernels']} kernels; "
        f"{in_parts['bytes'] / compiled['bytes']:.2f} times where eager norms are not one kernel",
        found,
    )


def kept() -> Outcome:
    """Bytes that a block keeps for its backward pass."""
    found = measure()
    eager, compiled = (found[kind]["kept_bytes_a_sample"] for kind in ("eager", "compiled"))
    saving = 1 - compiled / eager
    return Outcome(
        saving >= LEAST_SAVING,
        f"at least {LEAST_SAVING:.0%} fewer bytes kept a sample than eager",
        f"-{saving:.1%}: {eager / 2**20:.1f} to {compiled / 2**20:.1f} MiB a sample and block",
        found,
    )
