"""Diffusion-transformer text-to-speech as a TorchTitan model family, `dit_tts`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
    from torchtitan.models.dit_tts.model.model import DiTTTSModel
    from torchtitan.models.dit_tts.model_config import model_flavors
    from torchtitan.models.dit_tts.train_spec import get_train_spec

__all__ = ["DiTTTSModel", "DiTTTSModelArgs", "get_train_spec", "model_flavors"]

_MODULES = {
    "DiTTTSModel": "model.model",
    "DiTTTSModelArgs": "model.args",
    "get_train_spec": "train_spec",
    "model_flavors": "model_config",
}


def __getattr__(name: str) -> Any:
    # Every command imports this package; what trains and builds models takes seconds to import.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
