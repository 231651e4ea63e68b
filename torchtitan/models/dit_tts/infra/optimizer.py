"""Optimizers of a run: which parameters decay, which learning rate they have, and who updates them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Adam, AdamW, Optimizer

from torchtitan.components.ft import FTManager
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import LRScheduler as LRSchedulerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import Optimizer as OptimizerConfig
from torchtitan.models.dit_tts.infra.low_precision_adamw import BFloat16AdamW, build_8bit_adamw
from torchtitan.models.dit_tts.infra.matmul_weights import matmul_weights
from torchtitan.models.dit_tts.infra.muon import Muon
from torchtitan.models.dit_tts.model.layers import HeadRMSNorm
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class TTSOptimizers(OptimizersContainer):
    """One or more optimizers that share a model's parameters, as one checkpointed state.

    A checkpoint has the state of each parameter, by the parameter's name: groups may be others than
    when it was saved. The groups' settings (weight decay, betas ...) are the config's, and learning
    rates the schedule's.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]):
        self.model_parts = [model]
        self.optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._post_init([parameter for group in groups for parameter in group["params"]], {})

    def _all(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model_parts[0], self.optimizers, options=_OPTIONS)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._all().items() if _is_state(name)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        settings = {name: value for name, value in self._all().items() if not _is_state(name)}
        states = {name: value for name, value in state_dict.items() if _is_state(name)}
        set_optimizer_state_dict(
            self.model_parts[0],
            self.optimizers,
            optim_state_dict={**settings, **states},
            options=_OPTIONS,
        )


def _is_state(name: str) -> bool:
    """Of a flattened optimizer's names: state.PARAMETER.KEY, or param_groups.PARAMETER.KEY."""
    return name.startswith("state.")


def embeddings(model: nn.Module) -> set[nn.Parameter]:
    """Tables of which a step uses some rows. In 8 bits the second moment of a row that is not used
    falls to 0 before the first one does, and its update is then no longer limited; Dettmers et al.
    2022 keep them in float32."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return {parameter for table in tables for parameter in table.parameters(recurse=False)}


def without_decay(model: nn.Module) -> set[nn.Parameter]:
    """Norms, biases and embeddings: everything but the matrices of products."""
    kept = embeddings(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim < 2 or isinstance(module, HeadRMSNorm):
                kept.add(parameter)
    return kept


def _groups(
    parameters: Iterable[nn.Parameter],
    undecayed: set[nn.Parameter],
    slow: set[nn.Parameter],
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """At most four groups: with and without decay, at the model's and the encoder's learning rate."""
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter in slow, parameter in undecayed), []).append(parameter)
    return [
        {
            "params": kinds[is_slow, plain],
            "lr": config.encoder_lr if is_slow else config.lr,
            "weight_decay": 0.0 if plain else config.weight_decay,
        }
        for is_slow, plain in sorted(kinds)
    ]


def build_tts_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: FTManager | None = None,
) -> TTSOptimizers:
    """Upstream's hook, for one model part."""
    [model] = model_parts
    config = optimizer_config
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    undecayed = without_decay(model)
    encoder = model.text_encoder
    slow = set(encoder.parameters()) if isinstance(encoder, PretrainedTextEncoder) else set()
    optimizers: list[Optimizer] = []
    if config.name == "Muon":
        fused = {linear.weight: parts for linear, parts in matmul_weights(model).items()}
        parameters = [parameter for parameter in parameters if parameter not in fused]
        lr = config.muon_lr or config.lr
        optimizers.append(Muon(fused, lr=lr, weight_decay=config.weight_decay, fused=fused))

    def adam(some: list[nn.Parameter], kind: Callable[..., Optimizer]) -> Optimizer:
        groups = _groups(some, undecayed, slow, config)
        return kind(groups, betas=(config.beta1, config.beta2), eps=config.eps)

    if config.state_dtype == "8bit":
        tables = embeddings(model).intersection(parameters)
        if tables:
            optimizers.append(adam([p for p in parameters if p in tables], _adam(config)))
        first = adam([p for p in parameters if p not in tables], build_8bit_adamw)
    else:
        first = adam(parameters, _adam(config))
    # First, since its first group's learning rate is what is logged.
    return TTSOptimizers(model, [first, *optimizers])


def _adam(config: OptimizerConfig) -> Callable[..., Optimizer]:
    kind = Adam if config.name == "Adam" else AdamW
    if config.state_dtype == "bfloat16":
        kind = BFloat16AdamW
    implementation = config.implementation
    return partial(kind, fused=implementation == "fused", foreach=implementation == "foreach")


class TTSLRSchedulers(LRSchedulersContainer):
    """Upstream's schedules, of which a checkpoint brings the position alone.

    Upstream stores the first optimizer's base learning rates and gives them to all: wrong for two
    optimizers, and for groups that are others than when it was saved.
    """

    def __init__(self, schedulers: LRSchedulersContainer):
        self.schedulers = list(schedulers)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            epoch = scheduler.last_epoch = state_dict["last_epoch"]
            groups = scheduler.optimizer.param_groups
            for group, base, factor in zip(
                groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                rate = float(base) * factor(epoch)
                if isinstance(group["lr"], torch.Tensor):  # torchao's, which its kernels read
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            scheduler._last_lr = [group["lr"] for group in groups]


def build_tts_lr_schedulers(
    optimizers: TTSOptimizers, lr_scheduler_config: LRSchedulerConfig, training_steps: int
) -> TTSLRSchedulers:
    """Upstream's hook."""
    return TTSLRSchedulers(build_lr_schedulers(optimizers, lr_scheduler_config, training_steps))
