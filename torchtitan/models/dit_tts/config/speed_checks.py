"""Checks of how a run computes: kernels, compiling, precision, optimizer, benchmark."""

import os

from torchtitan.models.dit_tts.config.job_config import (
    FLOAT8_CONVERTER,
    JobConfig,
    graphed_components,
    is_pretrained,
)
from torchtitan.models.dit_tts.config.keys import conflict

_MIN_CUDA_GRAPH_WARMUP = 3
"""Steps of a shape before its CUDA graphs are known to replay: the first compiles and runs without
them, the second records, and one more is for what was recorded late"""


def check_accelerator(config: JobConfig, accelerator: str) -> None:
    """Refuses what an accelerator cannot do, for which the CPU has stand-ins, and what a CPU cannot."""
    profiling = config.profiling
    if profiling.enable_profiling and accelerator == "cpu":
        # Upstream's profiler always asks for an accelerator's events.
        why = "it needs a GPU; leave it out, or take [benchmark] enable = true, which divides a step's time too"
        raise conflict(config, "profiling.enable_profiling", why)
    least = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < least:
        why = f"it must be at least profiler_warmup + profiler_active = {least}"
        raise conflict(config, "profiling.profile_freq", why)
    if config.kernels.modulated_norm == "triton":
        if accelerator == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            why = "it needs a GPU, or TRITON_INTERPRET=1 in the environment for a slow trial; set it to 'definition'"
            raise conflict(config, "kernels.modulated_norm", why)
        if config.data.batching == "packed":
            why = "its kernel takes no packed samples; set it to 'definition'"
            raise conflict(config, "kernels.modulated_norm data.batching", why)
    if accelerator == "cpu":
        return
    if config.training.mixed_precision_param != "bfloat16":
        for key, flash in (("attention.backend", "varlen"), ("data.batching", "packed")):
            if flash in (config.attention.backend, config.data.batching):
                why = "flash attention has no other precision than 'bfloat16'; change one of them"
                raise conflict(config, f"{key} training.mixed_precision_param", why)


def check_benchmark(config: JobConfig) -> None:
    benchmark, encoder = config.benchmark, config.encoder
    if not benchmark.enable:
        return
    if not benchmark.steps:
        raise conflict(
            config, "benchmark.enable benchmark.steps", "nothing would be timed; set steps"
        )
    if is_pretrained(encoder.model) and not encoder.frozen:
        why = "its weights would have to be loaded; set frozen = true"
        raise conflict(config, "benchmark.enable encoder.model encoder.frozen", why)


def check_compile(config: JobConfig, dp_degree: int) -> None:
    compiled = config.compile.components if config.compile.enable else []
    if config.activation_checkpoint.mode == "memory_budget" and "model" not in compiled:
        why = (
            "it needs [compile] enable = true with 'model' among its components; set it to another"
        )
        raise conflict(config, "activation_checkpoint.mode", why)
    if "text_encoder" in compiled and not (
        is_pretrained(config.encoder.model) and config.encoder.frozen
    ):
        why = "it is a pretrained text encoder outside the model; take 'text_encoder' out of components"
        raise conflict(config, "compile.components encoder.model encoder.frozen", why)
    if not graphed_components(config) - {
        "text_encoder"
    }:  # whose frozen weights stay where they are
        return
    if (
        dp_degree > 1
    ):  # a CUDA graph replays fixed addresses, and gathered weights are at others each time
        why = (
            f"{dp_degree} data-parallel ranks do not allow CUDA graphs; set it to 'default' or "
            "'max-autotune-no-cudagraphs'"
        )
        raise conflict(config, "compile.mode", why)
    if config.benchmark.enable and config.benchmark.warmup_steps < _MIN_CUDA_GRAPH_WARMUP:
        why = f"the recording of CUDA graphs would be timed; give at least {_MIN_CUDA_GRAPH_WARMUP}"
        raise conflict(config, "benchmark.warmup_steps compile.mode", why)


def check_optimizer(config: JobConfig, dp_degree: int) -> None:
    o, checkpoint = config.optimizer, config.checkpoint
    offloads = config.training.enable_cpu_offload
    if config.training.dtype != "float32":
        why = (
            "rounding would lose most updates of such weights; set it to 'float32', and for speed "
            "mixed_precision_param to 'bfloat16'"
        )
        raise conflict(config, "training.dtype", why)
    if o.state_dtype != "float32" and o.name != "AdamW":
        why = "only AdamW has other moments; set state_dtype to 'float32'"
        raise conflict(config, "optimizer.state_dtype optimizer.name", why)
    if offloads and dp_degree <= config.parallelism.data_parallel_replicate_degree:
        why = "it needs weights that are sharded over several GPUs (data_parallel_shard_degree); set it to false"
        raise conflict(config, "training.enable_cpu_offload", why)
    if offloads and (o.name == "Muon" or o.state_dtype == "8bit"):
        why = "the update would run on the CPU; use AdamW with state_dtype 'float32'"
        raise conflict(
            config, "training.enable_cpu_offload optimizer.name optimizer.state_dtype", why
        )
    if o.state_dtype == "8bit" and checkpoint.enable and checkpoint.async_mode != "disabled":
        why = "torchao's tensors cannot be staged; set async_mode to 'disabled'"
        raise conflict(config, "checkpoint.async_mode optimizer.state_dtype", why)


def check_float8(config: JobConfig) -> None:
    if not config.model.converters:
        return
    emulate = config.quantize.linear.float8.emulate
    if set(config.model.converters) != {FLOAT8_CONVERTER}:
        raise conflict(config, "model.converters", f"allowed is {FLOAT8_CONVERTER!r}")
    if config.training.mixed_precision_param != "bfloat16" and not emulate:
        why = "fp8 products give bfloat16; set it to 'bfloat16'"
        raise conflict(config, "model.converters training.mixed_precision_param", why)
    if emulate and config.compile.enable:
        why = "emulation does not compile; set [compile] enable = false"
        raise conflict(config, "quantize.linear.float8.emulate compile.enable", why)
