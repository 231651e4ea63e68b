"""Exponential moving averages of the weights, sharded as they are and saved with them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.models.dit_tts.config.validation_figures import prefix, saved_prefixes
from torchtitan.models.dit_tts.infra.parallelize import local_tensor
from torchtitan.models.dit_tts.model.initialization import plain_name


class EMA(Stateful):
    """One average of a model's trained weights for each decay β, which is min(β, n / (9 + n)) after n updates:
    the first update copies the weights, and early averages follow them closely.

    Averages are float32, as the weights are, and sharded like these, so a checkpoint reshards both alike.
    """

    def __init__(self, model: nn.Module, decays: Sequence[float]):
        self.num_updates = 0
        self.weights = {
            plain_name(name): p for name, p in model.named_parameters() if p.requires_grad
        }
        self.averages = {
            decay: {name: p.detach().clone() for name, p in self.weights.items()}
            for decay in decays
        }
        self._read_as = {decay: prefix(decay) for decay in decays}

    @torch.no_grad()
    def update(self) -> None:
        """Moves every average towards the weights, after an optimizer step."""
        weights = [local_tensor(value.detach()) for value in self.weights.values()]
        for decay, average in self.averages.items():
            decay = min(decay, self.num_updates / (9.0 + self.num_updates))
            local = [local_tensor(value) for value in average.values()]
            torch._foreach_lerp_(local, weights, 1.0 - decay)
        self.num_updates += 1

    @torch.no_grad()
    def restart(self) -> None:
        """Sets every average to the present weights, as before the first update."""
        self.num_updates = 0
        for average in self.averages.values():
            for name, value in average.items():
                local_tensor(value).copy_(local_tensor(self.weights[name].detach()))

    @contextmanager
    def in_place_of_weights(self, decay: float) -> Iterator[None]:
        """Gives the model the averaged weights, and its own back afterwards, to the bit."""
        own = [local_tensor(value.detach()) for value in self.weights.values()]
        average = [local_tensor(value) for value in self.averages[decay].values()]
        _swap(own, average)
        try:
            yield
        finally:
            _swap(own, average)

    def read_from(self, names: Collection[str]) -> None:
        """Prepares to load a checkpoint with these entries. An average that it lacks starts from the
        checkpoint's slowest."""
        saved = saved_prefixes(names)
        self._read_as = {
            decay: prefix(decay) if prefix(decay) in saved else saved[-1] for decay in self.averages
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_updates": self.num_updates}
        for decay, average in self.averages.items():
            state |= {f"{self._read_as[decay]}{name}": value for name, value in average.items()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_updates = state_dict["num_updates"]
        for decay, average in self.averages.items():
            for name, value in average.items():
                source = state_dict[f"{self._read_as[decay]}{name}"]
                local_tensor(value).copy_(local_tensor(source))
        self._read_as = {decay: prefix(decay) for decay in self.averages}


@torch.no_grad()
def _swap(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        before = one.clone()
        one.copy_(other)
        other.copy_(before)
