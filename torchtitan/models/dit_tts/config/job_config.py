"""A run's config: its sections, what is declared of upstream's keys, and the constants that checks use too.

A key of ours is declared once, in its section: next to its type stand the bounds of a number and the marks, below it
its help. `keys.py` reads them.
"""

from dataclasses import dataclass

import torchtitan.config.job_config as titan
from torchtitan.models.dit_tts.config.data_sections import Data, Encoder
from torchtitan.models.dit_tts.config.marks import (
    EXPORTED,
    FRACTION,
    NOT_NEGATIVE,
    OFF,
    POSITIVE,
    RECIPE,
    TRAINING,
    UNUSED,
    WORKLOAD,
    Bounds,
    Mark,
    section,
)
from torchtitan.models.dit_tts.config.run_sections import (
    EMA,
    Attention,
    Benchmark,
    Distill,
    Divergence,
    Kernels,
    Lora,
    Objective,
    Resume,
    Samples,
    Sampling,
    Validation,
)
from torchtitan.models.dit_tts.config.upstream_sections import (
    Checkpoint,
    Compile,
    Job,
    Megatron,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Training,
)

PHONES = "phones"
LEARNED_UNITS = ("bytes", "chars", PHONES)
"""Units of text of the learned encoder inside the model; `[encoder] model` is one of them, with a language behind
the last: phones:en-us"""

LEARNED_SUBWORDS = "subwords:"
"""Begin of `[encoder] model` where the learned encoder reads the pieces of a pretrained tokenizer, whose folder or name
follows"""

CONDITIONING_FIELDS = ("speaker", "language", "quality", "class", "duration")
"""Values of `[data] conditioning`"""

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Values of `[compile] mode` that replay kernels from CUDA graphs"""

DURATION_FLAVOR = "duration"
"""`[model] flavor` of the network that predicts the lengths of utterances"""

FLOAT8_CONVERTER = "float8"
"""Name of our fp8 converter in `[model] converters`"""

EVALUATIONS_PER_STEP = {"euler": 1, "midpoint": 2, "heun": 2}
"""of the velocity, in an interval of the schedule"""


def is_pretrained(encoder_model: str) -> bool:
    """True if `[encoder] model` names a pretrained encoder and not the learned one's unit."""
    learned = (f"{PHONES}:", LEARNED_SUBWORDS)
    return encoder_model not in ("bytes", "chars") and not encoder_model.startswith(learned)


@dataclass
class JobConfig(titan.JobConfig):
    """The sections that this family reads, in the order of --help."""

    job: Job = section(Job)
    data: Data = section(Data)
    encoder: Encoder = section(Encoder)
    model: Model = section(Model)
    lora: Lora = section(Lora)
    attention: Attention = section(Attention)
    kernels: Kernels = section(Kernels)
    objective: Objective = section(Objective, TRAINING, EXPORTED)
    distill: Distill = section(Distill)
    optimizer: Optimizer = section(Optimizer, TRAINING, RECIPE)
    lr_scheduler: titan.LRScheduler = section(titan.LRScheduler, TRAINING, RECIPE)
    training: Training = section(Training)
    ema: EMA = section(EMA, TRAINING, RECIPE)
    validation: Validation = section(Validation)  # type: ignore[assignment]
    samples: Samples = section(Samples)
    sampling: Sampling = section(Sampling, EXPORTED)
    checkpoint: Checkpoint = section(Checkpoint)
    resume: Resume = section(Resume)
    divergence: Divergence = section(Divergence)
    parallelism: Parallelism = section(Parallelism)
    megatron: Megatron = section(Megatron)
    activation_checkpoint: titan.ActivationCheckpoint = section(titan.ActivationCheckpoint)
    compile: Compile = section(Compile)
    quantize: titan.Quantize = section(titan.Quantize)
    metrics: Metrics = section(Metrics)
    benchmark: Benchmark = section(Benchmark)
    profiling: titan.Profiling = section(titan.Profiling)
    comm: titan.Comm = section(titan.Comm)
    debug: titan.Debug = section(titan.Debug)


def graphed_components(config: JobConfig) -> set[str]:
    """The [compile] components that CUDA graphs replay; "loss" has no mode."""
    compiled = config.compile
    named: set[str] = {*compiled.components}
    replays = compiled.enable and compiled.mode in CUDA_GRAPH_MODES
    return named - {"loss"} if replays else set()


UPSTREAM: dict[Bounds | Mark, str] = {
    POSITIVE: "metrics.log_freq checkpoint.interval comm.*_timeout_seconds optimizer.eps training.max_norm training.steps",
    NOT_NEGATIVE: "checkpoint.keep_latest_k lr_scheduler.warmup_steps optimizer.lr optimizer.weight_decay",
    FRACTION: "activation_checkpoint.memory_budget lr_scheduler.decay_ratio lr_scheduler.min_lr_factor optimizer.beta?",
    Bounds(1): "parallelism.data_parallel_replicate_degree",
    Bounds(1, 1): "parallelism.context_parallel_degree parallelism.pipeline_parallel_degree "
    "parallelism.expert_parallel_degree",
    TRAINING: "model.converters training.max_norm",
    WORKLOAD: "quantize.linear.float8.recipe_name training.enable_cpu_offload",
    RECIPE: "checkpoint.interval checkpoint.keep_latest_k training.max_norm training.dtype "
    "training.mixed_precision_param",
    # Weights are gathered in mixed_precision_param.
    OFF: "optimizer.early_step_in_backward metrics.save_for_all_ranks checkpoint.*_in_hf fault_tolerance.enable "
    "quantize.linear.float8.enable_fsdp_float8_all_gather "
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    UNUSED: "job.custom_config_module job.save_config_file model.tokenizer_path training.dataset* training.seq_len "
    "training.dataloader.* parallelism.context_* parallelism.pipeline_* parallelism.expert_* "
    "parallelism.module_fqns* parallelism.disable_loss_parallel parallelism.enable_async_tensor* "
    "checkpoint.enable_ft* checkpoint.initial_load_in_hf_quantized activation_checkpoint.per_op_sac* "
    "quantize.grouped_mm.* quantize.linear.mx.* metrics.save_tb_folder debug.moe_*",
}
"""Bounds and marks of the keys of upstream's sections, by patterns of their names"""
