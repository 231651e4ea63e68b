"""Initial values of the parameters, independent of how they are laid out over ranks."""

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of activation checkpointing and compile wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def initial_value(
    name: str, shape: torch.Size, n_layers: int, generator: torch.Generator
) -> torch.Tensor:
    """Initial float32 value of one full parameter, on the generator's device.

    Norms are one. Biases, AdaLN's `up` matrices, the output and low-rank updates are zero: the network predicts
    zero. Other matrices are normal with variance 1 / fan-in; those that write to the residual stream are divided
    by √(2·layers).
    """
    device = generator.device
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    zero = (".bias", "adaln.up.weight", ".lora_b")
    if name == "output.weight" or name.endswith(zero):
        return torch.zeros(shape, device=device)
    std = 1.0 / math.sqrt(shape[-1])
    if name.startswith("layers.") and name.endswith(("attention.out.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * n_layers)
    if name.endswith("embedding.weight"):
        std = 1.0
    return torch.randn(shape, generator=generator, device=device) * std


def initialize(
    model: nn.Module,
    n_layers: int,
    seed: int,
    write_parameter: Callable[[nn.Parameter, torch.Tensor], Any],
    skip: Iterable[nn.Parameter] = (),
) -> None:
    """Fills every parameter of the model that is not in `skip`. A generator seeded with (seed, name) draws each
    full value, and `write_parameter` writes this process's part: a seed gives the same weights on any mesh."""
    skipped = set(skip)
    for name, parameter in model.named_parameters():
        if parameter in skipped:
            continue
        name = plain_name(name)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        write_parameter(parameter, initial_value(name, parameter.shape, n_layers, generator))
