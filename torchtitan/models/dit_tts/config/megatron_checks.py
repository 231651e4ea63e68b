"""Checks of tensor parallelism and of Megatron's and TransformerEngine's layers."""

from torchtitan.models.dit_tts.config.job_config import CUDA_GRAPH_MODES, DURATION_FLAVOR, JobConfig
from torchtitan.models.dit_tts.errors import require


def check_megatron(config: JobConfig, accelerator: str) -> None:
    options, backend = config.megatron, config.parallelism.backend
    tensor = config.parallelism.tensor_parallel_degree
    require(
        backend != "megatron" or config.model.flavor != DURATION_FLAVOR,
        f"[parallelism] backend = 'megatron' with [model] flavor = {DURATION_FLAVOR!r}, which has nothing to "
        f"divide; set it to 'torchtitan'",
    )
    by_te = options.transformer_impl == "transformer_engine"
    require(
        options == type(options)() or backend == "megatron",
        f"[megatron] has no effect with [parallelism] backend = {backend!r}; set that to 'megatron', or "
        f"leave the section out",
    )
    require(
        not options.sequence_parallel or (tensor > 1 and not by_te),
        f"[megatron] sequence_parallel = true with [parallelism] tensor_parallel_degree = {tensor} and "
        f"transformer_impl = {options.transformer_impl!r}; it needs a degree of at least 2 and 'local': "
        f"change them, or set it to false",
    )
    require(
        by_te or not (options.use_te_attn or options.fp8),
        "[megatron] use_te_attn and fp8 are TransformerEngine's; set transformer_impl = "
        "'transformer_engine', or both to false",
    )
    require(
        not by_te or accelerator != "cpu",
        "[megatron] transformer_impl = 'transformer_engine' needs a GPU; set it to 'local'",
    )
    require(
        not by_te or not config.compile.enable or "model" not in config.compile.components,
        "[megatron] transformer_impl = 'transformer_engine' does not compile; set [compile] components to "
        "others than 'model', or enable = false",
    )
    require(
        not options.use_te_attn or config.attention.backend == "varlen",
        f"[megatron] use_te_attn = true with [attention] backend = {config.attention.backend!r}; it takes "
        f"packed keys: set backend to 'varlen'",
    )
    require(
        not config.model.converters or (tensor == 1 and not by_te),
        f"[model] converters = {config.model.converters} with [parallelism] tensor_parallel_degree = "
        f"{tensor} and [megatron] transformer_impl = {options.transformer_impl!r}: these layers are not "
        f"converted; leave it out, and for fp8 use [megatron] fp8",
    )
    if tensor == 1:
        return
    for given, what, remedy in (
        (config.training.enable_cpu_offload, "[training] enable_cpu_offload = true", "false"),
        (
            config.compile.mode in CUDA_GRAPH_MODES,
            f"[compile] mode = {config.compile.mode!r}, which replays CUDA graphs,",
            "'default' or 'max-autotune-no-cudagraphs'",
        ),
    ):
        require(
            not given,
            f"{what} with [parallelism] tensor_parallel_degree = {tensor} is not supported; set it to {remedy}",
        )
