"""Builds the optimizers and learning rate schedules of a run, and saves and loads their state."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.components.ft import FTManager
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import LRScheduler as LRSchedulerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import Optimizer as OptimizerConfig
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.infra.matmul_weights import matmul_weights, weight_of
from torchtitan.models.dit_tts.infra.muon import Muon
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.initialization import plain_name
from torchtitan.models.dit_tts.model.layers import HeadWeights
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class TTSOptimizers(OptimizersContainer):
    """One or more optimizers of one model, with one state in the checkpoint.

    A checkpoint has each parameter's state under the parameter's name, so groups may change between saving
    and loading. The groups' settings (weight decay, betas) come from the config, learning rates from the
    schedule.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]):
        self.model_parts = [model]
        self.optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._post_init([parameter for group in groups for parameter in group["params"]], {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients. Not `set_to_none`: they become zeros in memory of their own, to which every backward pass
        adds. A gradient that a CUDA graph returns lies in the graph's memory: taken as it is, its next replay would
        overwrite the sum (pytorch issues 169545, 96693)."""
        super().zero_grad(set_to_none)
        for group in () if set_to_none else self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _all(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model_parts[0], self.optimizers, options=_OPTIONS)

    def step_unless(self, bad: torch.Tensor, norm: torch.Tensor, max_norm: float) -> None:
        """Steps with gradients of `norm` (), clipped to `max_norm`, unless `bad`, () on the device, is 1: then
        weights and state stay as they are. The host waits for the device only if an optimizer cannot read
        `bad` itself."""
        # torch's fused optimizers read `found_inf`, which its gradient scaler sets.
        looking = [o for o in self.optimizers if isinstance(o, Muon) or o.defaults.get("fused")]
        for optimizer in looking:
            optimizer.found_inf = bad  # type: ignore[attr-defined]
        for optimizer in self.optimizers:
            if optimizer.defaults.get("fused"):
                # The update itself divides by it, so that no pass over the gradients clips them.
                scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
            else:
                for group in optimizer.param_groups:
                    clip_grads_with_norm_(group["params"], max_norm, norm, foreach=True)
        if len(looking) == len(self.optimizers) or not bad:
            self.step()

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


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """() norm of all gradients, over all ranks that hold parts of them; 0 if there are none."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _is_state(name: str) -> bool:
    return name.startswith("state.")  # others are param_groups.PARAMETER.KEY


def embeddings(model: nn.Module) -> set[nn.Parameter]:
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return {parameter for table in tables for parameter in table.parameters(recurse=False)}


def without_decay(model: nn.Module) -> set[nn.Parameter]:
    """Norms, biases and embeddings: everything but the weights of matmuls."""
    found = embeddings(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim < 2 or isinstance(module, HeadWeights):
                found.add(parameter)
    return found


def fan_in_growth(model: DiTTTSModel, config: OptimizerConfig) -> dict[nn.Parameter, float]:
    """How many times as many inputs each matrix has as in the model for which the learning rates were found, where that differs.
    Raises InputError if that model is not known.

    With their rates in proportion to 1 / inputs a step changes activations alike at every width (μP; Yang et al.
    2022, Tensor Programs V, table 3). The rest of that table holds at any width: matrices start with variance
    1 / fan-in and the output at 0, and QK-norm with heads of one width fixes the attention's scale.
    """
    if not config.base_dim:
        return {}
    require(
        model.args.tuned is not None,
        f"[optimizer] base_dim = {config.base_dim}, but no flavor's decoder is so wide, and the other widths of one that is "
        f"are not known; take a flavor's, or 0",
    )
    with torch.device("meta"):
        tuned = DiTTTSModel(cast(DiTTTSModelArgs, model.args.tuned))
    before = {name: parameter.shape[-1] for name, parameter in tuned.named_parameters()}
    fixed, found = without_decay(model), {}
    for name, parameter in model.named_parameters():
        inputs = parameter.shape[-1]
        # A pretrained text encoder, which the other has not, is as wide in both.
        if parameter not in fixed and inputs != before.get(plain_name(name), inputs):
            found[parameter] = inputs / before[plain_name(name)]
    return found


def _groups(
    parameters: Iterable[nn.Parameter],
    undecayed: set[nn.Parameter],
    slow: set[nn.Parameter],
    growth: dict[nn.Parameter, float],
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """Groups with and without decay, at the learning rate of the model or of the encoder. The rate is divided by the
    parameter's `growth`, and rate times decay stays the same."""
    kinds: dict[tuple[bool, bool, bool, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        grown = growth.get(parameter, 1.0)
        kind = parameter in slow, parameter in undecayed, grown != 1.0, grown
        kinds.setdefault(kind, []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": (config.encoder_lr if is_slow else config.lr) / grown,
            "weight_decay": 0.0 if plain else config.weight_decay * grown,
        }
        for (is_slow, plain, _, grown), parameters in sorted(
            kinds.items(), key=lambda kind: kind[0]
        )
    ]


def build_tts_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: FTManager | None = None,
) -> TTSOptimizers:
    """Upstream's hook, for one model part."""
    model = cast(DiTTTSModel, model_parts[0])
    config = optimizer_config
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    undecayed = without_decay(model)
    encoder = model.text_encoder
    slow = set(encoder.parameters()) if isinstance(encoder, PretrainedTextEncoder) else set()
    growth = fan_in_growth(model, config)
    optimizers: list[Optimizer] = []
    if config.name == "Muon":
        fused = {weight_of(linear): parts for linear, parts in matmul_weights(model).items()}
        parameters = [parameter for parameter in parameters if parameter not in fused]
        # At one RMS an orthogonal update's spectral norm grows as √width, where AdamW's grows as width.
        slower = {parameter: growth.get(parameter, 1.0) ** 0.5 for parameter in fused}
        lr = config.muon_lr or config.lr
        for by in sorted(set(slower.values())):
            some = {each: layout for each, layout in fused.items() if slower[each] == by}
            optimizers.append(Muon(some, lr / by, config.weight_decay * by))

    def adam(some: list[nn.Parameter], kind: Callable[..., Optimizer]) -> Optimizer:
        groups = _groups(some, undecayed, slow, growth, config)
        return kind(groups, betas=(config.beta1, config.beta2), eps=config.eps)

    if config.state_dtype == "8bit":
        # A step uses some rows of an embedding only. In 8 bits the second moment of an unused row becomes
        # 0 before the first moment does, and its update explodes; Dettmers et al. 2022 keep float32.
        tables = embeddings(model).intersection(parameters)
        if tables:
            optimizers.append(adam([p for p in parameters if p in tables], _adam(config)))
        first = adam([p for p in parameters if p not in tables], _adam_8bit)
    else:
        first = adam(parameters, _adam(config))
    # AdamW comes first, since the learning rate of its first group is logged.
    return TTSOptimizers(model, [first, *optimizers])


def _adam(config: OptimizerConfig) -> Callable[..., Optimizer]:
    kind, implementation = Adam if config.name == "Adam" else AdamW, config.implementation
    return partial(kind, fused=implementation == "fused", foreach=implementation == "foreach")


def _adam_8bit(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """torchao's AdamW with moments in 8 bits, quantised in blocks of 256 elements (Dettmers et al. 2022). Tensors of
    fewer than 4096 elements per rank keep float32. Its update is compiled once per parameter shape."""
    from torchao.optim import AdamW8bit

    class EagerOnCPU(AdamW8bit):
        """Without compilation, which takes seconds per shape and saves little on a CPU."""

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            with torch.compiler.set_stance("force_eager"):
                super().step(closure)

    on_cpu = all(p.device.type in ("cpu", "meta") for group in groups for p in group["params"])
    return (EagerOnCPU if on_cpu else AdamW8bit)(groups, **options)


class TTSLRSchedulers(LRSchedulersContainer):
    """Upstream's schedules; a checkpoint holds their position alone. Upstream saves the base learning rates
    of the first optimizer and loads them into all, which is wrong for two optimizers or changed groups."""

    def __init__(self, schedulers: LRSchedulersContainer):
        self.schedulers = list(schedulers)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            epoch = scheduler.last_epoch = state_dict["last_epoch"]
            groups = scheduler.optimizer.param_groups
            assert isinstance(scheduler, LambdaLR)  # upstream's annotation is wider
            for group, base, factor in zip(
                groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                rate = float(base) * factor(epoch)
                if isinstance(group["lr"], torch.Tensor):  # torchao's, which its kernels read
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            scheduler._last_lr = [float(group["lr"]) for group in groups]


def build_tts_lr_schedulers(
    optimizers: TTSOptimizers, lr_scheduler_config: LRSchedulerConfig, training_steps: int
) -> TTSLRSchedulers:
    """Upstream's hook."""
    return TTSLRSchedulers(build_lr_schedulers(optimizers, lr_scheduler_config, training_steps))
