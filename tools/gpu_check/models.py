"""Models in every mode, built as the trainer builds them. A mode is a list of keys by their names: "compiled, own norm"."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import torch
import torch._functorch.config
import torch._inductor.config
from torchtitan.distributed import ParallelDims

from tools.gpu_check.supervisor import NotMeasured
from torchtitan.models.dit_tts.config.job_config import CUDA_GRAPH_MODES
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.config.upstream_sections import InductorOption
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.float8 import Float8Converter
from torchtitan.models.dit_tts.infra.kernels import build_model
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.infra.parallelize_megatron import parallelize_megatron
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

_OPTIONS = get_args(InductorOption)
_FP8 = "--model.converters=float8 --quantize.linear.float8.recipe_name="
_COMPILED = {  # those that say most first
    "own norm": "--kernels.modulated_norm=triton",
    "all options of Inductor": f"--compile.inductor {' '.join(_OPTIONS)}",
    **{option: f"--compile.inductor {option}" for option in _OPTIONS},
    "varlen": "--attention.backend=varlen",
    "fp8 rowwise": f"{_FP8}rowwise",
    "fp8 tensorwise": f"{_FP8}tensorwise",
    "memory budget": "--activation_checkpoint.mode=memory_budget --activation_checkpoint.memory_budget=0.9",
    **{m: f"--compile.mode={m}" for m in (*CUDA_GRAPH_MODES, "max-autotune-no-cudagraphs")},
}
KEYS = {  # of the config by the name of what they choose
    "eager": "",
    "compiled": "--compile.enable --compile.components=model",
    "all compiled": "--compile.enable --compile.components model encoders loss text_encoder",
    "TransformerEngine": "--megatron.transformer_impl=transformer_engine",
    "its fp8": "--megatron.fp8",
    "its attention": "--megatron.use_te_attn --attention.backend=varlen",
    **_COMPILED,
}

EAGER = ["eager", "varlen", "fp8 rowwise", "fp8 tensorwise"]
ENGINE = ["TransformerEngine", "TransformerEngine, its fp8", "TransformerEngine, its attention"]
COMPILED = ["compiled", *(f"compiled, {name}" for name in _COMPILED)]


def arguments(mode: str) -> list[str]:
    """Of the config, for all keys of a mode."""
    return [word for name in mode.split(", ") for word in KEYS[name].split()]


@contextmanager
def built(
    args: DiTTTSModelArgs, mode: str, device: str, weights: dict[str, torch.Tensor]
) -> Iterator[Any]:
    """The model on the device in that mode, as the trainer makes it on a single device; what the mode
    changes in the process is undone behind it."""
    emulated = ["--quantize.linear.float8.emulate"] if device == "cpu" else []
    plain = ["--activation_checkpoint.mode=none", "--attention.backend=sdpa"]
    config = load_config([*plain, *emulated, *arguments(mode)])
    one = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    args = replace(args, attention=config.attention.backend)
    with torch.device("meta"):  # drawing weights that are replaced would take longest of all
        model: Any = build_model(args)
    model.load_state_dict(weights, assign=True)
    inductor, functorch = torch._inductor.config, torch._functorch.config
    torch._dynamo.reset()
    with (
        inductor.patch("emulate_precision_casts", inductor.emulate_precision_casts),
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


def random_weights(args: DiTTTSModelArgs) -> dict[str, torch.Tensor]:
    """Weights that leave nothing at zero: at its initialisation the model's output is zero, and most
    gradients with it. Matrices of unit gain, norms near one, biases near zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = DiTTTSModel(args).state_dict()

    def value(name: str, like: torch.Tensor) -> torch.Tensor:
        gain = like.shape[-1] ** -0.5 if like.dim() > 1 else 0.1
        return gain * torch.randn(like.shape, generator=generator) + name.endswith("norm.weight")

    return {name: value(name, like) for name, like in shapes.items()}
