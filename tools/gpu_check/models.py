"""Models in every mode, built as the trainer builds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torchtitan.distributed import ParallelDims

from tools.gpu_check.items import NotMeasured
from torchtitan.models.dit_tts.config.job_config import CUDA_GRAPH_MODES, JobConfig
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.float8 import Float8Converter
from torchtitan.models.dit_tts.infra.kernels import build_model
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.infra.parallelize_megatron import parallelize_megatron
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

INDUCTOR_OPTIONS = {
    "max_autotune_pointwise": True,  # more block sizes are tried per kernel
    "coordinate_descent_tuning": True,  # from the best one on, its neighbours
    "triton.multi_kernel": 1,  # reductions also with the whole row in registers
}
"""Options of Inductor for the kernels other than the products, which `[compile]` leaves at their defaults"""


@dataclass(frozen=True)
class Mode:
    """One way to run the same model."""

    name: str
    arguments: tuple[str, ...] = ()
    """of the config"""

    options: dict[str, Any] = field(default_factory=dict)
    """of Inductor while it compiles"""

    precision: str = "bfloat16"
    """float32, or bfloat16 by autocast over float32 weights"""

    def __str__(self) -> str:
        return f"{self.precision}, {self.name}"


def _modes(name: str, common: tuple[str, ...], key: str, *values: str) -> list[Mode]:
    return [Mode(f"{name}{value}", (*common, f"--{key}={value}")) for value in values]


_COMPILED = ("--compile.enable", "--compile.components=model")
_ENGINE = ("--megatron.transformer_impl=transformer_engine",)
_FP8 = "--model.converters=float8", "quantize.linear.float8.recipe_name", "rowwise", "tensorwise"
_BUDGET = (
    "--activation_checkpoint.memory_budget=0.9",
    "--activation_checkpoint.mode=memory_budget",
)
_SELECTIVE = ("--activation_checkpoint.mode=selective",)
CHECKPOINTING = [
    Mode("checkpointing full", ("--activation_checkpoint.mode=full",)),
    *_modes("checkpointing ", _SELECTIVE, "activation_checkpoint.selective_ac_option", "2", "op"),
]
EAGER = [
    Mode("eager"),
    *_modes("", (), "attention.backend", "varlen"),
    *_modes("fp8 ", _FP8[:1], *_FP8[1:]),
]
"""The plain one first"""

ENGINE = [
    Mode("TransformerEngine", _ENGINE),
    Mode("TransformerEngine fp8", (*_ENGINE, "--megatron.fp8")),
    *_modes(
        "TransformerEngine's ", (*_ENGINE, "--megatron.use_te_attn"), "attention.backend", "varlen"
    ),
]
COMPILED = [
    Mode("compiled", _COMPILED),
    Mode("compiled, all options of Inductor", _COMPILED, INDUCTOR_OPTIONS),
    *(Mode(f"compiled, {name}", _COMPILED, {name: on}) for name, on in INDUCTOR_OPTIONS.items()),
    *_modes("compiled ", _COMPILED, "attention.backend", "varlen"),
    *_modes("compiled fp8 ", (*_COMPILED, _FP8[0]), *_FP8[1:]),
    Mode("compiled, memory budget", (*_COMPILED, *_BUDGET)),
    *_modes(
        "compiled ", _COMPILED, "compile.mode", *CUDA_GRAPH_MODES, "max-autotune-no-cudagraphs"
    ),
]
"""Those that say most first"""

TRITON_NORM = ("--kernels.modulated_norm=triton",)
OWN_NORM = [
    Mode("eager, own norm", TRITON_NORM),
    Mode("compiled, own norm", (*_COMPILED, *TRITON_NORM)),
]
"""Norm, scale and shift by our own kernels"""


def job_config(mode: Mode, device: str) -> JobConfig:
    emulated = ("--quantize.linear.float8.emulate",) if device == "cpu" else ()
    plain = ("--activation_checkpoint.mode=none", "--attention.backend=sdpa")
    return load_config([*plain, *emulated, *mode.arguments])


@contextmanager
def built(
    args: DiTTTSModelArgs, mode: Mode, device: str, weights: dict[str, torch.Tensor]
) -> Iterator[nn.Module]:
    """The model on the device in that mode, as the trainer makes it on a single device; what the mode
    changes in the process is undone behind it."""
    config = job_config(mode, device)
    one = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    args = replace(args, attention=config.attention.backend)
    with torch.device("meta"):  # drawing weights that are replaced would take longest of all
        model = build_model(args)
    model.load_state_dict(weights, assign=True)
    inductor, functorch = torch._inductor.config, torch._functorch.config
    kept = {"emulate_precision_casts": inductor.emulate_precision_casts}
    torch._dynamo.reset()
    with (
        inductor.patch(kept | mode.options),
        functorch.patch("activation_memory_budget", functorch.activation_memory_budget),
    ):
        try:
            if config.model.converters:
                Float8Converter(config, one).convert(model)
            engine = config.megatron.transformer_impl == "transformer_engine"
            parallelize = parallelize_megatron if engine else parallelize_dit_tts
            parallelize(model.to(device), one, config)
        except (ImportError, InputError) as error:  # without torchao, or a GPU without fp8
            raise NotMeasured(str(error)) from error
        yield model


def autocast(mode: Mode, device: str) -> torch.autocast:
    """Return the autocast of the trainer on a single device."""
    return torch.autocast(device, torch.bfloat16, enabled=mode.precision == "bfloat16")


def random_weights(args: DiTTTSModelArgs) -> dict[str, torch.Tensor]:
    """Weights that leave nothing at zero: at its initialisation the model's output is zero, and most
    gradients with it. Matrices of unit gain, norms near one, biases near zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = DiTTTSModel(args).state_dict()
    weights = {}
    for name, like in shapes.items():
        value = torch.randn(like.shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * value
        else:
            weights[name] = value / like.shape[-1] ** 0.5 if like.dim() > 1 else 0.1 * value
    return weights
