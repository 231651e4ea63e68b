"""One decoder block, forward and backward at the longest bucket, in each mode, judged by the time of its kernels.

The block is the model's own: a model of one block runs once, and what its block was given is kept and given to it again.
Every sample has full length, nothing is padded or dropped. FLOPs are the exact ones of `model/flops.py`, without
recomputation.
"""

from dataclasses import replace
from functools import partial

import torch

from tools.gpu_check.items import Item, Turn, Values
from tools.gpu_check.measuring import peak_gib, profiled, tflops, timed
from tools.gpu_check.models import (
    ATTENTION_BACKENDS,
    CHECKPOINTING,
    COMPILE_MODES,
    ENGINE_FP8,
    FP8_RECIPES,
    INDUCTOR_OPTIONS,
    Mode,
    autocast,
    built,
    random_weights,
)
from tools.gpu_check.numerics import Batch, make_batch
from tools.gpu_check.settings import Settings
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths, forward_flops


def block_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """Of one block and one sample, forward and backward."""
    with_one, with_none = (forward_flops(replace(args, n_layers=n), lengths) for n in (1, 0))
    return 3 * (with_one - with_none)


class _Recorder(torch.nn.Module):
    """Stands in the block's place, and keeps what it is given."""

    def forward(self, x: torch.Tensor, *positional, **named) -> torch.Tensor:
        self.positional, self.named = (x, *positional), named
        return x


def full_batch(shape: tuple[int, int, int, int], args: DiTTTSModelArgs) -> Batch:
    """Samples of full length with all conditions."""
    batch = make_batch(shape, args)
    for name, mask in batch.arguments.items():
        if name.startswith("keep_") or name.endswith("_mask"):
            batch.arguments[name] = torch.ones_like(mask)
    return batch


class Work:
    """The block's passes on inputs of its own."""

    def __init__(self, model: torch.nn.Module, batch: Batch, mode: Mode, device: str):
        self.block, self.mode, self.device = model.layers[0], mode, device
        model.layers[0] = recorder = _Recorder()
        try:
            with autocast(mode, device):
                model(**batch.arguments)
        finally:
            model.layers[0] = self.block
        self.positional = tuple(map(_detached, recorder.positional))
        self.named = {name: _detached(x) for name, x in recorder.named.items()}
        inputs = (*self.positional, *self.named.values(), *self.block.parameters())
        self.differentiated = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]

    def both(self) -> None:
        with autocast(self.mode, self.device):
            out = self.block(*self.positional, **self.named)
        # Not backward(): gradients that stay with the inputs are added to, which is traffic of its own,
        # and lie in memory that the next replay of a CUDA graph writes to.
        torch.autograd.grad(out, self.differentiated, out.detach())


def _detached(given):
    """The same input, as a leaf that takes a gradient where it had one."""
    if isinstance(given, torch.Tensor):
        return given.detach().requires_grad_(given.requires_grad)
    return given


def measure(flavor: str, mode: Mode, settings: Settings, turn: Turn) -> Values:
    shape = samples, *lengths = (2, 48, 16, 32) if settings.tiny else (32, 768, 192, 384)
    args = replace(model_flavors()[flavor], n_layers=1)
    flops = samples * block_flops(args, Lengths(*lengths))
    with built(args, mode, settings.device, random_weights(args, seed=0)) as model:
        batch = full_batch(shape, args).to(settings.device, torch.float32)
        work = Work(model, batch, mode, settings.device)
        for _ in range(4):
            work.both()
        turn()
        found = profiled(work.both, settings.device)
        took = timed(work.both, settings.device, 0.02 if settings.tiny else 0.3)
        return {
            "ms_of_kernels": found["ms_of_kernels"],
            "tflops": tflops(flops, found["ms_of_kernels"]),
            "peak_gib": peak_gib(work.both, settings.device),
            "samples": samples,
            **took,
            **found,
        }


def modes(settings: Settings) -> list[Mode]:
    """Those that say most first."""
    compiled = partial(Mode, precision="bfloat16", compile="default")
    eager = Mode(precision="bfloat16")
    if settings.tiny:
        return [compiled(), Mode("varlen", "bfloat16")]
    every = tuple(INDUCTOR_OPTIONS)
    chosen = [compiled(), compiled(options=every), eager]
    chosen += [compiled(options=(name,)) for name in every]
    chosen += [compiled(name) for name in ATTENTION_BACKENDS[1:]]
    chosen += [compiled(checkpointing=CHECKPOINTING[-1])]
    chosen += [compiled(fp8=recipe) for recipe in FP8_RECIPES[::-1]]
    chosen += [Mode(precision="bfloat16", compile=mode) for mode in COMPILE_MODES[1:]]
    chosen += [Mode("varlen", "bfloat16", fp8=recipe, engine=True) for recipe in ("", ENGINE_FP8)]
    return chosen


def items(settings: Settings) -> list[Item]:
    return [
        Item("block", f"{flavor} block {mode.name}", partial(measure, flavor, mode, settings), 6.0)
        for flavor in settings.flavors
        for mode in modes(settings)
    ]
