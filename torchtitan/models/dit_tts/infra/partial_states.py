"""States of which a checkpoint that is loaded has a part."""

from collections.abc import Collection
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpoint import OPTIMIZER, ModelWrapper
from torchtitan.models.dit_tts.model.alignment import is_of_head


def without_new_heads(states: dict[str, Any], table: Collection[str]) -> dict[str, Any]:
    """The states to load, without an alignment head that a checkpoint of these entries lacks: that begins as
    it is."""
    found = {name: value for name, value in states.items() if name in table or not is_of_head(name)}
    if len(found) < len(states) and OPTIMIZER in found:
        found[OPTIMIZER] = _Present(states[OPTIMIZER], table, f"{OPTIMIZER}.")
    return found


class _Present(Stateful):
    """A state while it is loaded from a checkpoint that has a part of it; the rest stays as it is."""

    def __init__(self, state: Stateful, table: Collection[str], prefix: str):
        self.state = state
        self.names = {name.removeprefix(prefix) for name in table}

    def state_dict(self) -> dict[str, Any]:
        state = self.state.state_dict()
        return {name: value for name, value in state.items() if name in self.names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state.load_state_dict({**self.state.state_dict(), **state_dict})


class WithoutTextEncoder:
    """The model's state while it is loaded from weights without the text encoder's."""

    def __init__(self, model: ModelWrapper):
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return {
            name: value for name, value in state.items() if not name.startswith("text_encoder.")
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model.load_state_dict(state_dict)
