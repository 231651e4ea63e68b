"""One decoder block, forward and backward at the longest bucket, in each mode, judged by the time of its kernels.

The block is the model's own: a model of one block runs once, and what its block was given is kept and given to it again.
Every sample has full length, nothing is padded or dropped. FLOPs are the exact ones of `model/flops.py`, without
recomputation.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tools.gpu_check.items import Item, Settings, Turn, Values
from tools.gpu_check.measuring import peak_gib, profiled, tflops
from tools.gpu_check.models import (
    COMPILED,
    EAGER,
    ENGINE,
    OWN_NORM,
    Mode,
    autocast,
    built,
    random_weights,
)
from tools.gpu_check.numerics import Arguments, make_batch
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.attention_backends import MaskedKeys
from torchtitan.models.dit_tts.model.flops import Lengths, forward_flops


class _Recorder(torch.nn.Module):
    """Stands in the block's place, and keeps what it is given."""

    def forward(self, x: torch.Tensor, *positional, **named) -> torch.Tensor:
        self.positional, self.named = (x, *positional), named
        return x


def full_batch(shape: tuple[int, ...], args: DiTTTSModelArgs) -> Arguments:
    """Samples of full length with all conditions."""
    batch = make_batch(shape, args)
    masks = {name: torch.ones_like(x) for name, x in batch.items() if x.dtype == torch.bool}
    return batch | masks


class Work:
    """The block's passes on inputs of its own; `masked` attention, although no key is hidden."""

    def __init__(self, model: Any, batch: Arguments, mode: Mode, device: str, masked: bool = True):
        self.block, self.mode, self.device = model.layers[0], mode, device
        model.layers[0] = recorder = _Recorder()
        with autocast(mode, device):
            model(**{name: x.to(device) for name, x in batch.items()})
        model.layers[0] = self.block
        self.positional = tuple(
            each._replace(mask=None)
            if isinstance(each, MaskedKeys) and not masked
            else _detached(each)
            for each in recorder.positional
        )
        self.named = {name: _detached(x) for name, x in recorder.named.items()}
        inputs = (*self.positional, *self.named.values(), *self.block.parameters())
        self.differentiated = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]

    def both(self) -> None:
        with autocast(self.mode, self.device):
            out = self.block(*self.positional, **self.named)
        # Not backward(): gradients that stay with the inputs are added to, which is traffic of its own,
        # and lie in memory that the next replay of a CUDA graph writes to.
        torch.autograd.grad(out, self.differentiated, out.detach())


def _detached(given: Any) -> Any:
    """The same input, as a leaf that takes a gradient where it had one."""
    if isinstance(given, torch.Tensor):
        return given.detach().requires_grad_(given.requires_grad)
    return given


def measure(flavor: str, mode: Mode, masked: bool, settings: Settings, turn: Turn) -> Values:
    shape = samples, *lengths = (2, 48, 16, 32) if settings.tiny else (32, 768, 192, 384)
    args = replace(model_flavors()[flavor], n_layers=1)
    one, none = (forward_flops(replace(args, n_layers=n), Lengths(*lengths)) for n in (1, 0))
    with built(args, mode, settings.device, random_weights(args)) as model:
        work = Work(model, full_batch(shape, args), mode, settings.device, masked)
        for _ in range(4):
            work.both()
        turn()
        found = profiled(work.both, settings.device)
        return {
            "ms_of_kernels": found["ms_of_kernels"],
            "tflops": tflops(3 * samples * (one - none), found["ms_of_kernels"]),
            "peak_gib": peak_gib(work.both, settings.device),
            "samples": samples,
            **found,
        }


def items(settings: Settings) -> list[Item]:
    own = OWN_NORM[1]
    modes = [*COMPILED[:2], own, EAGER[0], *COMPILED[2:], OWN_NORM[0], *ENGINE]
    if settings.tiny:
        modes = [COMPILED[0], EAGER[1], own]
    cases = [(mode, str(mode), True) for mode in modes]
    cases[1:1] = [
        (mode, f"{mode}, no mask", False) for mode in (COMPILED[0], own)[: 2 - settings.tiny]
    ]
    return [
        Item("block", f"{flavor} block {said}", partial(measure, flavor, mode, masked, settings))
        for flavor in settings.flavors
        for mode, said, masked in cases
    ]
