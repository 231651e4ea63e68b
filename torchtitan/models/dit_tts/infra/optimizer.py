"""Optimizers with a learning rate of its own for a pretrained text encoder that is trained."""

from typing import Any

from torch import nn

from torchtitan.components.ft import FTManager
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.conditioning.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.job_config import Optimizer


def build_tts_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: Optimizer,
    parallel_dims: ParallelDims,
    ft_manager: FTManager | None = None,
) -> OptimizersContainer:
    """Upstream's hook. Upstream's container has one group; a trained encoder's parameters become a
    second one, to which the schedule's factor applies in the same way."""
    container = build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    for model, optimizer in zip(container.model_parts, container.optimizers, strict=True):
        encoder = model.text_encoder
        if not isinstance(encoder, PretrainedTextEncoder):
            continue
        own = set(encoder.parameters())
        [group] = optimizer.param_groups
        fast = [parameter for parameter in group["params"] if parameter not in own]
        slow = [parameter for parameter in group["params"] if parameter in own]
        options: dict[str, Any] = {key: group[key] for key in group if key != "params"}
        optimizer.param_groups.clear()
        optimizer.add_param_group({**options, "params": fast})
        optimizer.add_param_group({**options, "params": slow, "lr": optimizer_config.encoder_lr})
    return container
