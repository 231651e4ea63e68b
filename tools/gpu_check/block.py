"""Stage: one decoder block, forward and backward at the longest bucket, in each mode.

The block is the model's own: a model of one block runs once, and what its block was given is kept and
given to it again. Every sample has full length, nothing is padded or dropped. FLOPs are the exact ones of
`model/flops.py`, without recomputation.
"""

from dataclasses import replace
from functools import cache, partial

import torch

from tools.gpu_check.items import Item, Values
from tools.gpu_check.measuring import GIB, kernels, peak_gib, tflops, timed
from tools.gpu_check.models import (
    ATTENTION_BACKENDS,
    BACKWARDS,
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
from torchtitan.models.dit_tts.config.job_config import CUDA_GRAPH_MODES
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


class _Recorder(torch.nn.Module):
    """Stands in the block's place, and keeps what it is given."""

    def forward(self, x: torch.Tensor, *positional, **named) -> torch.Tensor:
        self.positional, self.named = (x, *positional), named
        return x


def _batch(shape: tuple[int, int, int, int], args: DiTTTSModelArgs, useful: float) -> Batch:
    """Nothing dropped, and lengths that are spread evenly around `useful` of each stream's longest."""
    batch = make_batch(shape, args)
    fraction = torch.linspace(2 * useful - 1, 1.0, shape[0])[:, None]
    for name, mask in batch.arguments.items():
        if name.startswith("keep_"):
            batch.arguments[name] = torch.ones_like(mask)
        elif name.endswith("_mask"):
            longest = mask.shape[1]
            batch.arguments[name] = torch.arange(longest) < (fraction * longest).round()
    return batch


def _given(model: torch.nn.Module, batch: Batch, mode: Mode, device: str) -> tuple[tuple, dict]:
    """Positional and named arguments of the model's first block, each a leaf of its own."""
    block, recorder = model.layers[0], _Recorder()
    model.layers[0] = recorder
    try:
        with autocast(mode, device):
            model(**batch.arguments)
    finally:
        model.layers[0] = block
    named = {name: _detached(x) for name, x in recorder.named.items()}
    return tuple(_detached(x) for x in recorder.positional), named


def _detached(given):
    """The same input, as a leaf that takes a gradient where it had one."""
    if isinstance(given, torch.Tensor):
        return given.detach().requires_grad_(given.requires_grad)
    return given


class _Work:
    """The block's passes on inputs of its own."""

    def __init__(self, model: torch.nn.Module, batch: Batch, mode: Mode, device: str):
        self.block, self.mode, self.device = model.layers[0], mode, device
        self.positional, self.named = _given(model, batch, mode, device)
        inputs = (*self.positional, *self.named.values(), *self.block.parameters())
        self.differentiated = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]

    def forward(self) -> torch.Tensor:
        with autocast(self.mode, self.device):
            return self.block(*self.positional, **self.named)

    def both(self) -> None:
        out = self.forward()
        # Not backward(): gradients that stay with the inputs are added to, which is traffic of its own,
        # and lie in memory that the next replay of a CUDA graph writes to.
        torch.autograd.grad(out, self.differentiated, out.detach())

    def kept_gib(self) -> float:
        """What the forward pass leaves for the backward pass, its output included."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = self.forward()
        kept = torch.cuda.memory_allocated() - before
        del out
        return kept / GIB


def measure(flavor: str, mode: Mode, settings: Settings) -> Values:
    """Milliseconds, TFLOP/s and memory of the block in this mode, on samples of full length.

    Backends that leave padding out are also timed at 90 % useful lengths; FLOPs are those of the padded
    sizes in either case.
    """
    shape = samples, frames, text, speaker = (
        (2, 48, 16, 32) if settings.tiny else (32, 768, 192, 384)
    )
    device, seconds = settings.device, 0.02 if settings.tiny else 0.4
    one, weights = _one_block(flavor)
    flops = samples * block_flops(one, Lengths(frames, text, speaker))
    with built(one, mode, device, weights) as model:

        def work(useful: float) -> _Work:
            return _Work(model, _batch(shape, one, useful).to(device, torch.float32), mode, device)

        full = work(1.0)
        took = timed(full.both, device, seconds)
        values: Values = {**took, "tflops": tflops(flops, took["ms_median"]), "samples": samples}
        memory = peak_gib(full.both, device)
        if memory is not None:
            values["peak_gib"] = memory
            each = kernels(full.both)
            # Less than the median: the device waited for the host.
            values["ms_of_kernels"] = sum(milliseconds for _, milliseconds in each)
            values["kernels"] = each
            if mode.compile not in CUDA_GRAPH_MODES:  # whose memory is a pool's
                values["kept_gib"] = full.kept_gib()
        if mode.attention != "sdpa":
            milliseconds = timed(work(0.9).both, device, seconds)["ms_median"]
            values["ms_at_90_percent_useful"] = milliseconds
            values["tflops_at_90_percent_useful"] = tflops(flops, milliseconds)
    return values


def modes(settings: Settings) -> list[Mode]:
    """Those that say most first: the stage's time may end before all are measured."""
    compiled = partial(Mode, precision="bfloat16", compile="default")
    # A GPU's default is autograd.
    by_autograd, by_hand = (Mode(precision="bfloat16", backward=each) for each in BACKWARDS)
    if settings.tiny:
        return [
            by_autograd,
            by_hand,
            compiled(),
            *(Mode(name, "bfloat16") for name in ATTENTION_BACKENDS[1:]),
            Mode(precision="bfloat16", checkpointing="full"),
        ]
    chosen = [by_autograd, compiled(), by_hand]
    chosen += [compiled(name) for name in ATTENTION_BACKENDS[1:]]
    chosen += [compiled(checkpointing=CHECKPOINTING[-1])]
    chosen += [compiled(option=name) for name in INDUCTOR_OPTIONS]
    chosen += [compiled(fp8=recipe) for recipe in FP8_RECIPES[::-1]]
    chosen += [Mode("varlen", "bfloat16", fp8=recipe, engine=True) for recipe in ("", ENGINE_FP8)]
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
