"""Checks of what is trained in another way: Megatron's and TransformerEngine's layers, the duration model, LoRA."""

from operator import attrgetter
from typing import Any

from torchtitan.models.dit_tts.config.job_config import (
    CUDA_GRAPH_MODES,
    DURATION_FLAVOR,
    JobConfig,
    is_pretrained,
)
from torchtitan.models.dit_tts.config.keys import conflict


def check_megatron(config: JobConfig, accelerator: str) -> None:
    options, parallelism = config.megatron, config.parallelism
    by_te = options.transformer_impl == "transformer_engine"
    split = parallelism.tensor_parallel_degree > 1
    layers = "parallelism.tensor_parallel_degree megatron.transformer_impl"
    if parallelism.backend == "megatron" and config.model.flavor == DURATION_FLAVOR:
        why = "it has nothing to divide; set backend to 'torchtitan'"
        raise conflict(config, "parallelism.backend model.flavor", why)
    if parallelism.backend != "megatron" and options != type(options)():
        why = "[megatron] has no effect; set it to 'megatron', or leave the section out"
        raise conflict(config, "parallelism.backend", why)
    if options.sequence_parallel and (by_te or not split):
        why = "it needs a degree of at least 2 and 'local'; change them, or set it to false"
        raise conflict(config, f"megatron.sequence_parallel {layers}", why)
    if not by_te and (options.use_te_attn or options.fp8):
        why = "these are TransformerEngine's; set transformer_impl = 'transformer_engine'"
        raise conflict(config, "megatron.use_te_attn megatron.fp8", why)
    if by_te and accelerator == "cpu":
        raise conflict(config, "megatron.transformer_impl", "it needs a GPU; set it to 'local'")
    if by_te and config.compile.enable and "model" in config.compile.components:
        why = "it does not compile; take 'model' out of [compile] components"
        raise conflict(config, "megatron.transformer_impl compile.components", why)
    if options.use_te_attn and config.attention.backend != "varlen":
        why = "it takes packed keys; set backend to 'varlen'"
        raise conflict(config, "megatron.use_te_attn attention.backend", why)
    if config.model.converters and (split or by_te):
        why = "these layers are not converted; leave it out, and for fp8 use [megatron] fp8"
        raise conflict(config, f"model.converters {layers}", why)
    if split and config.training.enable_cpu_offload:
        why = "it is not supported; set enable_cpu_offload to false"
        raise conflict(
            config, "training.enable_cpu_offload parallelism.tensor_parallel_degree", why
        )
    if split and config.compile.mode in CUDA_GRAPH_MODES:
        why = "CUDA graphs are not supported; set mode to 'default' or 'max-autotune-no-cudagraphs'"
        raise conflict(config, "compile.mode parallelism.tensor_parallel_degree", why)


_NEEDED_BY_DURATION: dict[str, tuple[Any, str]] = {
    "model.text_positions": ("none", "positions of the text follow from the length"),
    "objective.text_dropout": (0.0, "a length without its text is a mean over all texts"),
    "objective.loss_on_padding": (False, "padding would count as speech"),
    "optimizer.base_dim": (0, "there is one such flavor"),
    "activation_checkpoint.mode": ("none", "it is small"),
    "samples.freq": (0, "it says nothing"),
}


def check_duration(config: JobConfig) -> None:
    """Refuses settings that a duration predictor would ignore or misunderstand."""
    if config.model.flavor != DURATION_FLAVOR:
        return
    for name, (needed, why) in _NEEDED_BY_DURATION.items():
        if attrgetter(name)(config) != needed:
            key = name.partition(".")[2]
            why = f"{why}; set {key} to {str(needed).lower() if needed is False else repr(needed)}"
            raise conflict(config, f"{name} model.flavor", why)
    if "duration" in config.data.conditioning:
        why = "which predicts it; take 'duration' out of the list"
        raise conflict(config, "data.conditioning model.flavor", why)


def check_lora(config: JobConfig) -> None:
    if not config.lora.rank:
        return
    checkpoint, optimizer = config.checkpoint, config.optimizer
    starts = checkpoint.initial_load_path and checkpoint.initial_load_model_only
    if not starts and not config.benchmark.enable:
        why = (
            "it needs the weights that it is for; set [checkpoint] initial_load_path to an exported folder or a "
            "checkpoint, and leave initial_load_model_only true"
        )
        raise conflict(config, "lora.rank", why)
    trains_encoder = is_pretrained(config.encoder.model) and not config.encoder.frozen
    for refused, name, remedy in (
        (config.model.flavor == DURATION_FLAVOR, "model.flavor", "another"),
        (optimizer.name == "Muon", "optimizer.name", "'AdamW'"),
        (optimizer.base_dim > 0, "optimizer.base_dim", "0"),
        (config.model.converters, "model.converters", "[]"),
        (config.megatron.transformer_impl != "local", "megatron.transformer_impl", "'local'"),
        (
            config.parallelism.tensor_parallel_degree > 1,
            "parallelism.tensor_parallel_degree",
            "1",
        ),
        (trains_encoder, "encoder.frozen", "true"),
    ):
        if refused:
            why = f"it is not supported; set {name.partition('.')[2]} to {remedy}"
            raise conflict(config, f"lora.rank {name}", why)
