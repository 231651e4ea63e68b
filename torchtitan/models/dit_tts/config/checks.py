"""Checks a config against itself and the machine before anything is built or opened."""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from torchtitan.models.dit_tts.config.job_config import (
    BAD_STEPS_WINDOW,
    CONDITIONING_FIELDS,
    CUDA_GRAPH_MODES,
    FLOAT8_CONVERTER,
    MAX_BETA2_BFLOAT16,
    MAX_BUCKETS,
    Data,
    JobConfig,
    Training,
    is_pretrained,
)
from torchtitan.models.dit_tts.config.manager import run_folder_path
from torchtitan.models.dit_tts.config.validation_figures import (
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    is_higher_better,
    measured_figures,
)
from torchtitan.models.dit_tts.errors import InputError, require_modules
from torchtitan.tools.utils import device_type

_MIN_CUDA_GRAPH_WARMUP = 3
"""Steps of a shape before its CUDA graphs are known to replay: the first compiles and runs without
them, the second records, and one more is for what was recorded late"""

_POSITIVE = {
    "training": "steps max_norm",
    "metrics": "log_freq",
    "checkpoint": "interval",
    "encoder": "n_layers n_heads",
    "optimizer": "eps",
    "comm": "init_timeout_seconds train_timeout_seconds",
    "data": "max_frames max_speaker_frames max_text_tokens batch_multiple latent_channels "
    "speaker_patch_size frames_per_second duration_token_seconds",
    "sampling": "steps",
    "validation": "freq samples batch_size",
    "samples": "count",
    "objective": "logit_std time_shift",
    "alignment": "teacher_dim",
    "benchmark": "warmup_steps mean_seconds sigma",
}
_NOT_NEGATIVE = {
    "training": "local_batch_size batch_ramp_steps",
    "data": "epochs cache_gib num_workers prefetch_batches max_reference_ratio",
    "optimizer": "lr encoder_lr muon_lr weight_decay base_dim",
    "encoder": "fsdp_min_gib vocab_size dim",
    "checkpoint": "keep_latest_k",
    "lr_scheduler": "warmup_steps",
    "benchmark": "steps duration_seconds",
    "validation": "seed",
    "samples": "freq seed",
    "divergence": "spike_sigmas max_bad_steps max_rollbacks",
    "alignment": "ctc_weight ctc_layer teacher_weight teacher_layer teacher_hidden_layer",
}
_FRACTIONS = {
    "data": "conditioning_dropout max_corrupt_fraction max_dropped_fraction",
    "objective": "text_dropout speaker_dropout",
    "optimizer": "beta1 beta2",
    "lr_scheduler": "min_lr_factor",
    "sampling": "min_t",
    "alignment": "stop_fraction",
    "activation_checkpoint": "memory_budget",
}
_LIMITED = "max_frames max_speaker_frames max_reference_ratio epochs cache_gib num_workers prefetch_batches"
# Upstream's switches that this family would ignore or break on.
_UNSUPPORTED = {
    "optimizer": "early_step_in_backward",
    "metrics": "save_for_all_ranks",
    "checkpoint": "last_save_in_hf initial_load_in_hf",
    "fault_tolerance": "enable",
    # Weights are gathered in mixed_precision_param.
    "quantize.linear.float8": "enable_fsdp_float8_all_gather "
    "precompute_float8_dynamic_scale_for_fsdp",
}


MAX_NAME_BYTES = 255
"""of a file's name, on all usual file systems"""


def require(condition: bool, message: str) -> None:
    """Raises InputError with the message unless the condition holds."""
    if not condition:
        raise InputError(message)


def data_parallel_degree(config: JobConfig, world_size: int) -> int:
    """Ranks that see different data: replicas times shards.

    Raises:
        InputError: degrees that do not multiply to the number of processes.
    """
    p = config.parallelism
    for kind in ("tensor", "context", "pipeline", "expert"):
        degree = getattr(p, f"{kind}_parallel_degree")
        require(
            degree == 1,
            f"[parallelism] {kind}_parallel_degree = {degree} is not supported by this model family; "
            f"set it to 1 and use data_parallel_shard_degree or data_parallel_replicate_degree",
        )
    replicate, shard = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    require(
        replicate >= 1 and (shard >= 1 or shard == -1),
        f"[parallelism] data_parallel_replicate_degree = {replicate} and data_parallel_shard_degree = "
        f"{shard}, but they must be at least 1 (shard also -1: all processes that are left)",
    )
    if shard == -1:
        shard = max(1, world_size // replicate)
    require(
        replicate * shard == world_size,
        f"[parallelism] data_parallel_replicate_degree {replicate} x data_parallel_shard_degree "
        f"{shard} = {replicate * shard}, but {world_size} processes were started; their product "
        f"must be {world_size} (NGPU sets the number of processes)",
    )
    return replicate * shard


def batch_split(training: Training, dp_degree: int) -> tuple[int, int]:
    """(samples of a global batch of the longest bucket, accumulation steps), by upstream's rule.

    A negative `global_batch_size` means one accumulation step; a `local_batch_size` of 0 is the global
    batch divided by the ranks.

    Raises:
        InputError: a global batch that cannot be divided by local batch x ranks.
    """
    total, local = training.global_batch_size, training.local_batch_size
    if local == 0:
        require(
            total > 0 and total % dp_degree == 0,
            f"[training] global_batch_size = {total} is not a multiple of {dp_degree} data-parallel "
            f"ranks, as local_batch_size = 0 needs; change one of them",
        )
        return total, 1
    per_pass = local * dp_degree
    if total < 0:
        return per_pass, 1
    require(
        total >= per_pass and total % per_pass == 0,
        f"[training] global_batch_size = {total} is not a multiple of local_batch_size {local} x "
        f"{dp_degree} data-parallel ranks = {per_pass}; change one of them",
    )
    return total, total // per_pass


def ramp_accumulation(accumulation: int, divisor: int) -> int:
    """Micro-batches of a step with a part of the global batch: as few as keep each within its size in a
    complete one, of `accumulation`."""
    return -(-accumulation // divisor)


def accumulation_steps(config: JobConfig, dp_degree: int) -> int:
    """Micro-batches per step; see `batch_split`."""
    return batch_split(config.training, dp_degree)[1]


def validate_config(
    config: JobConfig, world_size: int, flavors: list[str], accelerator: str | None = None
) -> None:
    """Raises InputError at the first setting that cannot work.

    Args:
        config: the run's.
        world_size: number of its processes.
        flavors: names of the model sizes.
        accelerator: torch's name of the kind of device it runs on; None: this machine's.
    """
    _check_ranges(config)
    require(
        config.model.name == "dit_tts",
        f"[model] name = {config.model.name!r}: train.py trains only 'dit_tts'",
    )
    require(
        config.model.flavor in flavors,
        f"[model] flavor = {config.model.flavor!r} is not known; allowed are {', '.join(flavors)}",
    )
    name = config.job.experiment
    require(
        "/" not in name
        and name.strip() not in ("", ".", "..")
        and name.isprintable()
        and len(name.encode()) <= MAX_NAME_BYTES,
        f"[job] experiment = {name!r} must be a folder's name without '/', of printable characters and at "
        f"most {MAX_NAME_BYTES} bytes",
    )
    require(
        "\0" not in config.job.dump_folder,
        f"[job] dump_folder = {config.job.dump_folder!r} is no path; give that of a folder",
    )
    decay_ratio = config.lr_scheduler.decay_ratio
    require(
        decay_ratio is None or 0 <= decay_ratio <= 1,
        f"[lr_scheduler] decay_ratio = {decay_ratio}, but it must be from 0 to 1",
    )
    dp_degree = data_parallel_degree(config, world_size)
    global_batch, steps = batch_split(config.training, dp_degree)
    _check_data(config.data, global_batch, dp_degree, steps)
    _check_batch_ramp(config, dp_degree, steps)
    _check_text(config)
    objective = config.objective
    require(
        objective.logit_mean_end is None or objective.time_distribution == "logit_normal",
        f"[objective] logit_mean_end = {objective.logit_mean_end} with time_distribution = "
        f"{objective.time_distribution!r}, which has no mean; use 'logit_normal' or leave logit_mean_end out",
    )
    _check_attention(config, accelerator or device_type)
    _check_benchmark(config)
    _check_checkpoint(config, world_size)
    _check_validation(config)
    _check_compile(config, dp_degree, steps)
    _check_optimizer(config, dp_degree)
    _check_float8(config)


def validate_machine(config: JobConfig) -> None:
    """Raises InputError where this machine cannot train with the config. A plan does not call it."""
    require(
        device_type != "cpu" or not config.training.enable_cpu_offload,
        "[training] enable_cpu_offload = true needs an accelerator to offload from; set it to false",
    )
    require(
        device_type != "cpu" or config.checkpoint.async_mode != "async_with_pinned_mem",
        "[checkpoint] async_mode = 'async_with_pinned_mem' needs an accelerator; on this machine set "
        "it to 'async' or 'disabled'",
    )
    if config.samples.freq:
        require_modules("soundfile", "matplotlib")
        require_modules(*(("jiwer", "transformers") if config.samples.recognizer else ()))


def _check_ranges(config: JobConfig) -> None:
    def settings(names: dict[str, str]) -> Iterator[tuple[str, Any]]:
        for section, keys in names.items():
            for key in keys.split():
                yield f"[{section}] {key}", attrgetter(f"{section}.{key}")(config)

    for name, value in settings(_POSITIVE):
        require(value > 0, f"{name} = {value}, but it must be greater than 0")
    for name, value in settings(_NOT_NEGATIVE):
        require(value >= 0, f"{name} = {value}, but it must not be negative")
    for name, value in settings(_FRACTIONS):
        require(0 <= value <= 1, f"{name} = {value}, but it must be from 0 to 1")
    for name, value in settings({"data": _LIMITED}):
        require(value <= 10**6, f"{name} = {value}, but it must not be greater than 10^6")
    decays = config.ema.decays
    require(
        len(set(decays)) == len(decays) > 0 and all(0 <= decay <= 1 for decay in decays),
        f"[ema] decays = {decays}, but it must be one or more different numbers from 0 to 1",
    )
    bad_steps = config.divergence.max_bad_steps
    require(
        bad_steps < BAD_STEPS_WINDOW,
        f"[divergence] max_bad_steps = {bad_steps}, but it must be less than {BAD_STEPS_WINDOW}, the steps "
        f"among which they are counted",
    )
    for name, value in settings(_UNSUPPORTED):
        require(not value, f"{name} = true is not supported by this model family; set it to false")
    for name, value in _numbers(asdict(config)):
        if isinstance(value, float):
            finite = math.isfinite(value) or (name == "[training] max_norm" and value == math.inf)
            require(finite, f"{name} = {value}, but it must be finite")
        require(
            abs(value) < 2**63 or value == math.inf, f"{name} = {value}, but it must be below 2^63"
        )


def _numbers(sections: dict[str, Any], place: str = "") -> Iterator[tuple[str, int | float]]:
    """([section] key, value) of every number of a config."""
    for name, value in sections.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{place}.{name}" if place else name)
        elif isinstance(value, (int, float)):
            yield f"[{place}] {name}", value


def _check_data(data: Data, global_batch: int, dp_degree: int, accumulation: int) -> None:
    """Mistakes in `[data]` that show without opening the data."""
    blocks = dp_degree * accumulation
    edges, sizes = data.bucket_frames, data.bucket_batch_sizes
    require(
        len(sizes) in (0, len(edges)),
        f"[data] bucket_batch_sizes has {len(sizes)} numbers and bucket_frames {len(edges)}; give one for "
        f"each bucket, or none to have them chosen",
    )
    require(
        all(size > 0 and size % blocks == 0 for size in sizes),
        f"[data] bucket_batch_sizes = {sizes}, but each must be a positive multiple of {dp_degree} "
        f"data-parallel ranks x {accumulation} accumulation steps = {blocks}",
    )
    require(
        not sizes or sizes[-1] == global_batch,
        f"[data] bucket_batch_sizes ends with {sizes[-1:]}, but [training] global_batch_size comes to "
        f"{global_batch} samples of the longest bucket; set both alike",
    )
    require(
        bool(sizes) or data.batch_multiple % blocks == 0,
        f"[data] batch_multiple = {data.batch_multiple} cannot be divided among {dp_degree} "
        f"data-parallel ranks x {accumulation} accumulation steps; set it to a multiple of {blocks} "
        f"that divides global_batch_size",
    )
    require(
        bool(sizes) or global_batch % data.batch_multiple == 0,
        f"[training] global_batch_size comes to {global_batch} samples, which is not a multiple of "
        f"[data] batch_multiple = {data.batch_multiple}; change one of them",
    )
    require(
        data.max_speaker_frames % data.speaker_patch_size == 0,
        f"[data] max_speaker_frames = {data.max_speaker_frames} is not a multiple of "
        f"speaker_patch_size = {data.speaker_patch_size}; set it to one",
    )
    require(
        1 <= data.num_buckets <= MAX_BUCKETS,
        f"[data] num_buckets = {data.num_buckets}, but it must be from 1 to {MAX_BUCKETS}: every bucket "
        f"is a compiled shape",
    )
    require(
        len(edges) <= MAX_BUCKETS and all(low < high for low, high in zip([0, *edges], edges)),
        f"[data] bucket_frames = {edges}, but it must be up to {MAX_BUCKETS} positive lengths in "
        f"ascending order, or empty to have them chosen",
    )
    require(
        not edges or edges[-1] <= data.max_frames,
        f"[data] bucket_frames ends at {edges[-1:]}, above max_frames = {data.max_frames}; lower the "
        f"one or raise the other",
    )
    datasets = 1 if isinstance(data.path, str) else len(data.path)
    require(
        len(data.weights) in (0, datasets),
        f"[data] weights has {len(data.weights)} numbers and path {datasets} datasets; give one for "
        f"each, or none to take each dataset as it is",
    )
    require(
        all(1e-6 <= weight <= 1e6 for weight in data.weights),
        f"[data] weights = {data.weights}, but each must be from 1e-6 to 1e6",
    )
    require(
        0 <= data.balance_beta < 1
        and abs(data.duration_alpha) <= 10
        and 0 <= data.duration_offset_seconds <= 3600,
        f"[data] balance_beta = {data.balance_beta}, duration_alpha = {data.duration_alpha} and "
        f"duration_offset_seconds = {data.duration_offset_seconds}, but they must be from 0 to below 1, "
        f"from -10 to 10 and from 0 to 3600",
    )
    require(
        data.num_workers == 0 or data.prefetch_batches > 0,
        f"[data] prefetch_batches = 0 with num_workers = {data.num_workers}, but workers need at least "
        f"1; raise it or set num_workers = 0",
    )


def _check_batch_ramp(config: JobConfig, dp_degree: int, accumulation: int) -> None:
    training, data = config.training, config.data
    ramp, steps = training.batch_ramp, training.batch_ramp_steps
    require(
        all(high > low for high, low in zip(ramp, [*ramp[1:], 1])),
        f"[training] batch_ramp = {ramp}, but it must be divisors above 1 in descending order, such as "
        f"[8, 4, 2], or empty",
    )
    require(
        not ramp or (steps > 0 and not any(steps % divisor for divisor in ramp)),
        f"[training] batch_ramp_steps = {steps}, but it must be a positive multiple of each divisor in "
        f"batch_ramp = {ramp}, so that every phase ends with a global batch",
    )
    multiple = math.gcd(*(data.bucket_batch_sizes or [data.batch_multiple]))
    key = "bucket_batch_sizes" if data.bucket_batch_sizes else "batch_multiple"
    for divisor in ramp:
        micro_batches = ramp_accumulation(accumulation, divisor)
        blocks = divisor * micro_batches * dp_degree
        require(
            multiple % blocks == 0,
            f"[training] batch_ramp = {ramp}: a part of 1/{divisor} cannot be divided among {dp_degree} "
            f"data-parallel ranks x {micro_batches} accumulation steps; make [data] {key} multiples of "
            f"{blocks}, or leave {divisor} out",
        )


def _check_validation(config: JobConfig) -> None:
    validation, samples = config.validation, config.samples
    require(
        len(set(validation.times)) == len(validation.times) > 0
        and all(0 < t <= 1 for t in validation.times),
        f"[validation] times = {validation.times}, but it must be one or more different times above 0 and "
        f"at most 1",
    )
    require(
        validation.batch_size > 1,
        "[validation] batch_size = 1, but at least 2 are needed: a sample's gain is measured with the text "
        "of another one in its batch",
    )
    figure = validation.keep_best
    require(
        not figure
        or figure in measured_figures(config)
        or (not validation.enable and is_higher_better(figure) is not None),
        f"[validation] keep_best = {figure!r} is no figure that is measured; allowed are "
        f"{', '.join((*LOWER_IS_BETTER, *HIGHER_IS_BETTER))}, at one of times such as heldout_loss_at_0.9, "
        f"of certain weights such as heldout_loss_raw, or an empty string; those of speech need [samples] "
        f"freq and what measures them",
    )
    require(
        samples.freq == 0 or (validation.enable and bool(validation.path)),
        f"[samples] freq = {samples.freq}, but there are no held-out texts to synthesize: set [validation] "
        f"enable = true and give its path, or set freq = 0",
    )


def _check_text(config: JobConfig) -> None:
    encoder, data = config.encoder, config.data
    pretrained = is_pretrained(encoder.model)
    require(
        config.model.text_positions == "none" or not config.objective.loss_on_padding,
        "[model] text_positions = 'scaled' with [objective] loss_on_padding = true: positions follow from "
        "the length of the speech, which such a model decides itself; set one of them to its default",
    )
    require(
        not pretrained or "/" in encoder.model,
        f"[encoder] model = {encoder.model!r} is not known; allowed are 'bytes' and 'chars', a folder of "
        f"a pretrained encoder, or a name of the Hugging Face hub such as 'google/t5gemma-2-270m-270m'",
    )
    require(
        not encoder.cache_features or (pretrained and encoder.frozen),
        f"[encoder] cache_features = true with model = {encoder.model!r} and frozen = "
        f"{str(encoder.frozen).lower()}; only a frozen pretrained encoder's features can be cached: "
        f"set cache_features = false",
    )
    require(
        set(data.conditioning) <= set(CONDITIONING_FIELDS)
        and len(set(data.conditioning)) == len(data.conditioning),
        f"[data] conditioning = {data.conditioning}; allowed are {', '.join(CONDITIONING_FIELDS)}, each "
        f"once",
    )


def _check_attention(config: JobConfig, accelerator: str) -> None:
    """What an accelerator's kernels cannot do; the CPU has stand-ins for them."""
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


def _check_benchmark(config: JobConfig) -> None:
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


def _check_checkpoint(config: JobConfig, world_size: int) -> None:
    checkpoint = config.checkpoint
    require(
        not checkpoint.create_seed_checkpoint or (checkpoint.enable and world_size == 1),
        f"[checkpoint] create_seed_checkpoint = true with {world_size} processes and enable = "
        f"{str(checkpoint.enable).lower()}; it needs 1 process and enable = true",
    )
    require(
        checkpoint.folder not in ("", ".", "..") and "/" not in checkpoint.folder,
        f"[checkpoint] folder = {checkpoint.folder!r} must be a folder's name without '/'; it lies in "
        f"the run folder",
    )
    resumes = (run_folder_path(config) / checkpoint.folder).exists()
    require(
        not checkpoint.initial_load_path or resumes or os.path.isdir(checkpoint.initial_load_path),
        f"[checkpoint] initial_load_path = {checkpoint.initial_load_path!r} is not a folder; give "
        f"that of one checkpoint, for example outputs/NAME/checkpoint/step-1000",
    )
    require(
        checkpoint.keep_latest_k != 1,
        "[checkpoint] keep_latest_k = 1 could leave no complete checkpoint after a crash; allowed are "
        "0, which keeps all, or at least 2",
    )


def _check_compile(config: JobConfig, dp_degree: int, accumulation: int) -> None:
    compile_config, ac = config.compile, config.activation_checkpoint
    compiled = compile_config.components if compile_config.enable else []
    require(
        ac.mode != "memory_budget" or "model" in compiled,
        "[activation_checkpoint] mode = 'memory_budget' needs [compile] enable = true",
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


def _check_optimizer(config: JobConfig, dp_degree: int) -> None:
    o, checkpoint = config.optimizer, config.checkpoint
    require(
        o.name in ("Adam", "AdamW", "Muon"),
        f"[optimizer] name = {o.name!r} is not known; allowed are Adam, AdamW and Muon",
    )
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


def _check_float8(config: JobConfig) -> None:
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
