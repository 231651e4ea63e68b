"""Checks of how a run computes: attention kernels, compiling, precision, optimizer, benchmark."""

from torchtitan.models.dit_tts.config.job_config import (
    CUDA_GRAPH_MODES,
    FLOAT8_CONVERTER,
    MAX_BETA2_BFLOAT16,
    JobConfig,
    is_pretrained,
)
from torchtitan.models.dit_tts.errors import require

_MIN_CUDA_GRAPH_WARMUP = 3
"""Steps of a shape before its CUDA graphs are known to replay: the first compiles and runs without
them, the second records, and one more is for what was recorded late"""


def check_attention(config: JobConfig, accelerator: str) -> None:
    """Refuses what an accelerator's kernels cannot do; the CPU has stand-ins for them."""
    backend, precision = config.attention.backend, config.training.mixed_precision_param
    if accelerator == "cpu":
        return
    require(
        backend != "flex" or (config.compile.enable and "model" in config.compile.components),
        "[attention] backend = 'flex' needs [compile] enable = true with 'model' among its components: "
        "uncompiled it holds the scores of all queries and keys; compile, or choose sdpa or varlen",
    )
    require(
        backend != "varlen" or precision == "bfloat16",
        f"[attention] backend = 'varlen' needs [training] mixed_precision_param = 'bfloat16', not "
        f"{precision!r}: flash attention has no other; set it, or choose sdpa",
    )
    require(
        config.data.batching != "packed" or precision == "bfloat16",
        f"[data] batching = 'packed' needs [training] mixed_precision_param = 'bfloat16' on a GPU, not "
        f"{precision!r}: its samples attend by flash attention, which has no other; set it, or batching to "
        f"'buckets'",
    )


def check_profiling(config: JobConfig, accelerator: str) -> None:
    """Refuses a CPU, since upstream's profiler always asks for an accelerator's events."""
    profiling = config.profiling
    if not profiling.enable_profiling:
        return
    require(
        accelerator != "cpu",
        "[profiling] enable_profiling = true needs a GPU; leave it out, or take [benchmark] enable = true, "
        "which reports how a step's time is divided, on a CPU too",
    )
    least = profiling.profiler_warmup + profiling.profiler_active
    require(
        profiling.profile_freq >= least,
        f"[profiling] profile_freq = {profiling.profile_freq}, but it must be at least profiler_warmup + "
        f"profiler_active = {least}",
    )


def check_benchmark(config: JobConfig) -> None:
    benchmark, encoder = config.benchmark, config.encoder
    if not benchmark.enable:
        return
    require(
        benchmark.steps > 0 or benchmark.duration_seconds > 0,
        "[benchmark] enable = true with steps = 0 and duration_seconds = 0 would never end; set one of "
        "them",
    )
    require(
        not is_pretrained(encoder.model) or encoder.frozen,
        f"[benchmark] enable = true with [encoder] model = {encoder.model!r} and frozen = false is not "
        f"supported: its weights would have to be loaded; set frozen = true",
    )


def check_compile(config: JobConfig, dp_degree: int, accumulation: int) -> None:
    compile_config, ac = config.compile, config.activation_checkpoint
    compiled = compile_config.components if compile_config.enable else []
    require(
        ac.mode != "memory_budget" or "model" in compiled,
        "[activation_checkpoint] mode = 'memory_budget' needs [compile] enable = true with 'model' among its "
        "components; set it to another",
    )
    mode = compile_config.mode
    require(
        mode == "default" or compile_config.backend == "inductor",
        f"[compile] mode = {mode!r} with backend = {compile_config.backend!r}; only the backend "
        f"'inductor' has modes: set mode to 'default'",
    )
    # The component "loss" has no mode.
    if mode not in CUDA_GRAPH_MODES or not {"model", "encoders"}.intersection(compiled):
        return
    # A CUDA graph replays fixed addresses, and gathered weights are at others each time.
    require(
        dp_degree == 1,
        f"[compile] mode = {mode!r} replays CUDA graphs, which the gathered weights of {dp_degree} "
        f"data-parallel ranks do not allow; set it to 'default' or 'max-autotune-no-cudagraphs'",
    )
    # Gradients that a graph has returned lie in its own memory, which the next replay overwrites
    # while they are still to be summed (pytorch issues 169545, 96693).
    require(
        accumulation == 1,
        f"[compile] mode = {mode!r} replays CUDA graphs, which {accumulation} accumulation steps "
        f"do not allow; set it to 'default' or 'max-autotune-no-cudagraphs', or raise [training] "
        f"local_batch_size to the global batch",
    )
    benchmark = config.benchmark
    require(
        not benchmark.enable or benchmark.warmup_steps >= _MIN_CUDA_GRAPH_WARMUP,
        f"[benchmark] warmup_steps = {benchmark.warmup_steps} with [compile] mode = {mode!r} would time "
        f"the recording of CUDA graphs; set it to at least {_MIN_CUDA_GRAPH_WARMUP}",
    )


def check_optimizer(config: JobConfig, dp_degree: int) -> None:
    o, checkpoint = config.optimizer, config.checkpoint
    require(
        config.training.dtype == "float32",
        f"[training] dtype = {config.training.dtype!r} is not supported: rounding would lose most updates "
        f"of such weights; set it to 'float32', and mixed_precision_param to 'bfloat16' for speed",
    )
    require(
        o.state_dtype == "float32" or o.name == "AdamW",
        f"[optimizer] state_dtype = {o.state_dtype!r} with name = {o.name!r} is not supported, only with "
        f"AdamW; set it to 'float32'",
    )
    require(
        o.state_dtype != "bfloat16" or o.beta2 <= MAX_BETA2_BFLOAT16,
        f"[optimizer] beta2 = {o.beta2} with state_dtype = 'bfloat16' would let rounding hold the "
        f"second moments up; at most {MAX_BETA2_BFLOAT16} is allowed",
    )
    require(
        not config.training.enable_cpu_offload
        or dp_degree > config.parallelism.data_parallel_replicate_degree,
        "[training] enable_cpu_offload = true is not supported unless weights are sharded over several "
        "GPUs (data_parallel_shard_degree); set it to false",
    )
    require(
        not config.training.enable_cpu_offload or (o.name != "Muon" and o.state_dtype != "8bit"),
        f"[training] enable_cpu_offload = true with [optimizer] name = {o.name!r} and state_dtype = "
        f"{o.state_dtype!r} is not supported: the update would run on the CPU; use AdamW with "
        f"state_dtype 'float32' or 'bfloat16'",
    )
    require(
        o.state_dtype != "8bit" or not checkpoint.enable or checkpoint.async_mode == "disabled",
        f"[checkpoint] async_mode = {checkpoint.async_mode!r} with [optimizer] state_dtype = '8bit' is "
        f"not supported: torchao's tensors cannot be staged; set async_mode to 'disabled'",
    )


def check_float8(config: JobConfig) -> None:
    if not config.model.converters:
        return
    float8 = config.quantize.linear.float8
    require(
        set(config.model.converters) == {FLOAT8_CONVERTER},
        f"[model] converters = {config.model.converters}; allowed is {FLOAT8_CONVERTER!r}",
    )
    require(
        config.training.mixed_precision_param == "bfloat16" or float8.emulate,
        f"[model] converters = ['float8'] with [training] mixed_precision_param = "
        f"{config.training.mixed_precision_param!r}; fp8 products give bfloat16: set it to 'bfloat16'",
    )
    require(
        not (float8.emulate and config.compile.enable),
        "[quantize.linear.float8] emulate = true does not compile; set [compile] enable = false",
    )
