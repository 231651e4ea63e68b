"""Checks the settings of speed and memory: compile, checkpointing, optimizer and fp8."""

from importlib.util import find_spec

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.compile import CUDA_GRAPH_MODES
from torchtitan.models.dit_tts.infra.float8 import CONVERTER
from torchtitan.models.dit_tts.infra.low_precision_adamw import MOST_BETA2_BFLOAT16

_LEAST_GRAPH_WARMUP = 3
"""Steps of a shape before its CUDA graphs are known to replay: the first compiles and runs without
them, the second records, and one more is for what was recorded late"""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def validate_speed(config: JobConfig, dp_degree: int, accumulation_steps: int) -> None:
    """Raises InputError at the first setting that cannot work, in one sentence."""
    _validate_compile(config, dp_degree, accumulation_steps)
    _validate_optimizer(config)
    _validate_float8(config)


def _validate_compile(config: JobConfig, dp_degree: int, accumulation_steps: int) -> None:
    compile_config, checkpointing = config.compile, config.activation_checkpoint
    compiled = compile_config.components if compile_config.enable else []
    _require(
        checkpointing.mode != "memory_budget" or "model" in compiled,
        "[activation_checkpoint] mode = 'memory_budget' needs [compile] enable = true",
    )
    _require(
        0 <= checkpointing.memory_budget <= 1,
        f"[activation_checkpoint] memory_budget = {checkpointing.memory_budget} must lie between 0 and "
        f"1: it is the share of the activations that is kept",
    )
    mode = compile_config.mode
    _require(
        mode == "default" or compile_config.backend == "inductor",
        f"[compile] mode = {mode!r} with backend = {compile_config.backend!r}; only the backend "
        f"'inductor' has modes: set mode to 'default'",
    )
    # The component "loss" has no mode.
    if mode not in CUDA_GRAPH_MODES or not {"model", "encoders"}.intersection(compiled):
        return
    # A CUDA graph replays fixed addresses, and gathered weights are at others each time.
    _require(
        dp_degree == 1,
        f"[compile] mode = {mode!r} replays CUDA graphs, which the gathered weights of {dp_degree} "
        f"data-parallel ranks do not allow; set it to 'default' or 'max-autotune-no-cudagraphs'",
    )
    # Gradients that a graph has returned lie in its own memory, which the next replay overwrites
    # while they are still to be summed (pytorch issues 169545, 96693).
    _require(
        accumulation_steps == 1,
        f"[compile] mode = {mode!r} replays CUDA graphs, which {accumulation_steps} accumulation steps "
        f"do not allow; set it to 'default' or 'max-autotune-no-cudagraphs', or raise [training] "
        f"local_batch_size to the global batch",
    )
    benchmark = config.benchmark
    _require(
        not benchmark.enable or benchmark.warmup_steps >= _LEAST_GRAPH_WARMUP,
        f"[benchmark] warmup_steps = {benchmark.warmup_steps} with [compile] mode = {mode!r} would time "
        f"the recording of CUDA graphs; set it to at least {_LEAST_GRAPH_WARMUP}",
    )


def _validate_optimizer(config: JobConfig) -> None:
    o = config.optimizer
    _require(
        o.name in ("Adam", "AdamW", "Muon"),
        f"[optimizer] name = {o.name!r} is not known; allowed are Adam, AdamW and Muon",
    )
    _require(
        config.training.dtype == "float32",
        f"[training] dtype = {config.training.dtype!r} is not supported: rounding would lose most updates "
        f"of such weights; set it to 'float32', and mixed_precision_param to 'bfloat16' for speed",
    )
    _require(o.muon_lr >= 0, f"[optimizer] muon_lr = {o.muon_lr} must not be negative")
    _require(
        o.state_dtype == "float32" or o.name == "AdamW",
        f"[optimizer] state_dtype = {o.state_dtype!r} with name = {o.name!r} is not supported; it is "
        f"AdamW's: set it to 'float32'",
    )
    _require(
        o.state_dtype != "bfloat16" or o.beta2 <= MOST_BETA2_BFLOAT16,
        f"[optimizer] beta2 = {o.beta2} with state_dtype = 'bfloat16' would let rounding hold the "
        f"second moments up; at most {MOST_BETA2_BFLOAT16} is allowed",
    )
    for wrong, value in (
        (o.name == "Muon", "name = 'Muon'"),
        (o.state_dtype == "8bit", "state_dtype = '8bit'"),
    ):
        _require(
            not (wrong and config.training.enable_cpu_offload),
            f"[optimizer] {value} with [training] enable_cpu_offload = true is not supported: the "
            f"update would run on the CPU; use AdamW with state_dtype 'float32' or 'bfloat16'",
        )
    _require(
        o.state_dtype != "8bit" or find_spec("torchao") is not None,
        "[optimizer] state_dtype = '8bit' needs the package torchao; install titan-tts[fp8] or set "
        "it to 'bfloat16'",
    )
    checkpoint = config.checkpoint
    _require(
        o.state_dtype != "8bit" or not checkpoint.enable or checkpoint.async_mode == "disabled",
        f"[checkpoint] async_mode = {checkpoint.async_mode!r} with [optimizer] state_dtype = '8bit' is "
        f"not supported: torchao's tensors cannot be staged; set async_mode to 'disabled'",
    )


def _validate_float8(config: JobConfig) -> None:
    for name in config.model.converters:
        _require(
            name == CONVERTER,
            f"[model] converters has {name!r}, which is not known; allowed is {CONVERTER!r}",
        )
    if not config.model.converters:
        return
    float8 = config.quantize.linear.float8
    _require(
        find_spec("torchao") is not None,
        "[model] converters = ['float8'] needs the package torchao; install titan-tts[fp8]",
    )
    _require(
        config.training.mixed_precision_param == "bfloat16" or float8.emulate,
        f"[model] converters = ['float8'] with [training] mixed_precision_param = "
        f"{config.training.mixed_precision_param!r}; fp8 products give bfloat16: set it to 'bfloat16'",
    )
    for key in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"):
        _require(
            not getattr(float8, key),
            f"[quantize.linear.float8] {key} = true is not supported: weights travel in "
            f"mixed_precision_param; set it to false",
        )
    _require(
        not (float8.emulate and config.compile.enable),
        "[quantize.linear.float8] emulate = true does not compile; set [compile] enable = false",
    )
