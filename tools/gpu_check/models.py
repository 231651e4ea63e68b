"""Models in every mode, built as the trainer builds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torchtitan.distributed import ParallelDims

from tools.gpu_check.items import NotMeasured
from torchtitan.models.dit_tts.config.job_config import JobConfig, Megatron
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.float8 import Float8Converter
from torchtitan.models.dit_tts.infra.kernels import build_model
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.infra.parallelize_megatron import parallelize_megatron
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
INDUCTOR_OPTIONS = {
    "max_autotune_pointwise": True,  # more block sizes are tried per kernel
    "coordinate_descent_tuning": True,  # from the best one on, its neighbours
    "triton.multi_kernel": 1,  # reductions also with the whole row in registers
}
"""Options of Inductor for the kernels beside the products, which `[compile]` leaves at their defaults"""
ATTENTION_BACKENDS = ("sdpa", "varlen", "flex")
_BUDGET = 0.9
CHECKPOINTING = ("none", "full", "every 2", "op", f"memory budget {_BUDGET}")
FP8_RECIPES = ("tensorwise", "rowwise")
ENGINE_FP8 = "current scaling"


@dataclass(frozen=True)
class Mode:
    """One way to run the same model."""

    attention: str = "sdpa"
    precision: str = "float32"
    """float32, or bfloat16 by autocast over float32 weights"""

    compile: str = ""
    """mode of torch.compile; empty: eager"""

    options: tuple[str, ...] = ()
    """those of INDUCTOR_OPTIONS that are on while compiling"""

    checkpointing: str = "none"
    fp8: str = ""
    """recipe of the large products; empty: none"""

    engine: bool = False
    """TransformerEngine's layers, which then multiply in fp8 if `fp8` names a recipe, and with varlen its
    attention"""

    @property
    def name(self) -> str:
        parts = [
            self.attention,
            self.precision,
            f"compiled {self.compile}" if self.compile else "eager",
        ]
        if self.options:
            parts.append(f"with {' and '.join(self.options)}")
        if self.engine:
            parts.append("TransformerEngine")
        if self.checkpointing != "none":
            parts.append(f"checkpointing {self.checkpointing}")
        if self.fp8:
            parts.append(f"fp8 {self.fp8}")
        return ", ".join(parts)


def job_config(mode: Mode, device: str) -> JobConfig:
    config = JobConfig()
    config.attention.backend = mode.attention
    if mode.compile:
        config.compile.enable = True
        config.compile.components = ["model"]
        config.compile.mode = mode.compile
    _set_checkpointing(config, mode)
    if mode.engine:
        config.megatron = Megatron("transformer_engine", mode.attention == "varlen", bool(mode.fp8))
    elif mode.fp8:
        config.model.converters = ["float8"]
        config.quantize.linear.float8.recipe_name = mode.fp8
        config.quantize.linear.float8.emulate = device == "cpu"
    return config


def _set_checkpointing(config: JobConfig, mode: Mode) -> None:
    section = config.activation_checkpoint
    if mode.checkpointing.startswith("memory budget"):
        section.mode, section.memory_budget = "memory_budget", _BUDGET
    elif mode.checkpointing in ("every 2", "op"):
        section.mode = "selective"
        section.selective_ac_option = mode.checkpointing.removeprefix("every ")
    else:
        section.mode = mode.checkpointing


@contextmanager
def built(
    args: DiTTTSModelArgs, mode: Mode, device: str, weights: dict[str, torch.Tensor]
) -> Iterator[nn.Module]:
    """The model on the device in that mode, as the trainer makes it on a single device; what the mode
    changes in the process is undone behind it."""
    config = job_config(mode, device)
    one = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    with torch.device("meta"):  # drawing weights that are replaced would take longest of all
        model = build_model(replace(args, attention=mode.attention))
    model.load_state_dict(weights, assign=True)
    changed = (
        (torch._functorch.config, "activation_memory_budget"),
        (torch._inductor.config, "emulate_precision_casts"),
    )
    before = [getattr(module, name) for module, name in changed]
    options = {name: INDUCTOR_OPTIONS[name] for name in mode.options}
    torch._dynamo.reset()
    try:
        if mode.fp8 and not mode.engine:
            _convert(model, config, one)
        parallelize = parallelize_megatron if mode.engine else parallelize_dit_tts
        try:
            parallelize(model.to(device), one, config)
        except InputError as error:
            raise NotMeasured(str(error)) from error
        with torch._inductor.config.patch(options):
            yield model
    finally:
        for (module, name), value in zip(changed, before):
            setattr(module, name, value)
        torch._dynamo.reset()


def _convert(model: nn.Module, config: JobConfig, dims: ParallelDims) -> None:
    try:
        Float8Converter(config, dims).convert(model)
    except (ImportError, InputError) as error:  # without torchao, or a GPU without fp8
        raise NotMeasured(f"fp8: {error}") from error


def autocast(mode: Mode, device: str) -> torch.autocast:
    """As the trainer on a single device."""
    return torch.autocast(device, torch.bfloat16, enabled=mode.precision == "bfloat16")


def random_weights(args: DiTTTSModelArgs, seed: int) -> dict[str, torch.Tensor]:
    """Weights that leave nothing at zero: at its initialisation the model's output is zero, and most
    gradients with it. Matrices of unit gain, norms near one, biases near zero."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Any] = {}
    with torch.device("meta"):
        shapes = DiTTTSModel(args).state_dict()
    for name, like in shapes.items():
        value = torch.randn(like.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * value
        elif like.dim() > 1:
            value = value / like.shape[-1] ** 0.5
        else:
            value = 0.1 * value
        weights[name] = value
    return weights
