"""Stage: one decoder block, forward and backward at the longest bucket, in each mode.

The block is the model's own: a model of one block runs once, and what its block was given is kept and
given to it again. FLOPs are the exact ones of `model/flops.py`, without recomputation.
"""

from dataclasses import replace
from functools import cache, partial

import torch

from benchmarks.gpu_check.items import Item, Values
from benchmarks.gpu_check.measuring import peak_gib, tflops, timed
from benchmarks.gpu_check.models import (
    ATTENTION_BACKENDS,
    CHECKPOINTING,
    COMPILE_MODES,
    FP8_RECIPES,
    Mode,
    autocast,
    built,
    random_weights,
)
from benchmarks.gpu_check.numerics import make_batch
from benchmarks.gpu_check.settings import Settings
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths, forward_flops

_SMALLEST_SECONDS = 2.0
_COMPILED_SECONDS = 8.0


def block_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """Of one block and one sample, forward and backward."""
    with_one, with_none = (forward_flops(replace(args, n_layers=n), lengths) for n in (1, 0))
    return 3 * (with_one - with_none)


@cache
def _one_block(flavor: str) -> tuple[DiTTTSModelArgs, dict[str, torch.Tensor]]:
    """Sizes and weights of the flavor's model of one block."""
    args = replace(model_flavors()[flavor], n_layers=1)
    return args, random_weights(args, seed=0)


def measure(flavor: str, mode: Mode, settings: Settings) -> Values:
    """Milliseconds, TFLOP/s and memory of the block in this mode."""
    samples, frames, text, speaker = (2, 48, 16, 32) if settings.tiny else (32, 768, 192, 384)
    device = settings.device
    one, weights = _one_block(flavor)
    batch = make_batch((samples, frames, text, speaker), one).to(device, torch.float32)
    with built(one, mode, device, weights) as model:
        block, given = model.layers[0], {}

        def keep(module, positional, named) -> None:
            given["positional"], given["named"] = positional, named

        hook = block.register_forward_pre_hook(keep, with_kwargs=True)
        with autocast(mode, device):
            output = model(**batch.arguments)
        hook.remove()
        del output
        positional = tuple(_detached(x) for x in given.pop("positional"))
        named = {name: _detached(x) for name, x in given.pop("named").items()}

        def forward_backward() -> None:
            with autocast(mode, device):
                out = block(*positional, **named)
            out.backward(out.detach())
            for parameter in block.parameters():
                parameter.grad = None

        took = timed(forward_backward, device, 0.02 if settings.tiny else 0.4)
        memory = peak_gib(forward_backward, device)
    flops = samples * block_flops(one, Lengths(frames, text, speaker))
    values: Values = {**took, "tflops": tflops(flops, took["ms_median"]), "samples": samples}
    return values if memory is None else {**values, "peak_gib": memory}


def _detached(given):
    """The same input, as a leaf of its own that takes a gradient where it had one."""
    if isinstance(given, torch.Tensor):
        return given.detach().requires_grad_(given.requires_grad)
    return given


def modes(settings: Settings) -> list[Mode]:
    """Those that say most first: the stage's time may end before all are measured."""
    compiled = partial(Mode, precision="bfloat16", compile="default")
    if settings.tiny:
        return [
            Mode(precision="bfloat16"),
            compiled(),
            *(Mode(name, "bfloat16") for name in ATTENTION_BACKENDS[1:]),
            Mode(precision="bfloat16", checkpointing="full"),
        ]
    chosen = [Mode(precision="bfloat16")]
    chosen += [compiled(name) for name in ATTENTION_BACKENDS]
    chosen += [compiled(fp8=recipe) for recipe in FP8_RECIPES[::-1]]
    chosen += [compiled(checkpointing=kind) for kind in CHECKPOINTING if kind in ("full", "op")]
    chosen += [Mode(precision="bfloat16", compile=mode) for mode in COMPILE_MODES[1:]]
    return chosen


def items(settings: Settings) -> list[Item]:
    torch.manual_seed(0)
    return [
        Item(
            f"{flavor} block {mode.name}",
            partial(measure, flavor, mode, settings),
            _SMALLEST_SECONDS if settings.tiny or not mode.compile else _COMPILED_SECONDS,
        )
        for mode in modes(settings)
        for flavor in settings.flavors
    ]
