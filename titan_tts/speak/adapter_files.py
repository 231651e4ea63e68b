"""Adapters on disk: in the checkpoints of their runs, or exported as a folder of their own.

    adapter.safetensors    the parameters under the run's names
    adapter.json           kind, rank and alpha, the base that they are for, step, and how the voice was prepared
"""

import warnings
from pathlib import Path
from typing import Any

import torch

from torchtitan.models.dit_tts.config.job_config import Adapter
from torchtitan.models.dit_tts.infra.adapters import REFERENCE, is_trained, merge
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.run.checkpoint_storage import load_checkpoint, read_table


def read_tensors(state: dict[str, Any], path: Path) -> None:
    """Reads a checkpoint's tensors into those of `state`, in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_checkpoint(state, path, no_dist=True)


def read_adapter(path: Path, entry: str) -> dict[str, torch.Tensor]:
    """The parameters that an adapter's checkpoint has behind the prefix `entry`, by name."""
    sizes = {
        name: value.size
        for name, value in read_table(path).state_dict_metadata.items()
        if name.startswith(entry) and is_trained(name.removeprefix(entry)) and hasattr(value, "size")
    }
    found = {name: torch.empty(size) for name, size in sizes.items()}
    read_tensors(found, path)
    return {name.removeprefix(entry): value for name, value in found.items()}


def add_to(
    model: DiTTTSModel, options: Adapter, values: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """Adds an adapter to the weights of the plain model; returns the learned reference (R, C), if it is one."""
    if options.kind == "reference":
        return values[REFERENCE]
    merge(model, values, options.alpha / options.rank)
    return None
