"""Exponential moving average of the weights, sharded as they are and saved with them."""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.models.dit_tts.infra.parallelize import local_tensor
from torchtitan.models.dit_tts.model.initialization import plain_name


class EMA(Stateful):
    """Average of a model's weights with decay min(decay, n / (9 + n)) after n earlier updates.

    The first update copies the weights, and early averages follow them closely. Averages are float32,
    whatever the dtype of the weights, because one update with a decay of 0.9999 changes less than
    bfloat16 resolves. They are sharded like the weights, so a checkpoint reshards them like the model.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.num_updates = 0
        self.weights = {plain_name(name): p for name, p in model.named_parameters()}
        self.shadow = {
            name: p.detach().to(torch.float32, copy=True) for name, p in self.weights.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Averages in the weights, after an optimizer step."""
        decay = min(self.decay, self.num_updates / (9.0 + self.num_updates))
        self.num_updates += 1
        torch._foreach_lerp_(
            [local_tensor(value) for value in self.shadow.values()],
            [local_tensor(value.detach()).float() for value in self.weights.values()],
            1.0 - decay,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, **self.shadow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_updates = state_dict["num_updates"]
        for name, value in self.shadow.items():
            local_tensor(value).copy_(local_tensor(state_dict[name]))
