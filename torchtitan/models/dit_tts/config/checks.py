"""Checks a config against itself, the machine and the data before anything is built."""

import os

from torchtitan.models.dit_tts.codec.record import check_kind
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path
from torchtitan.models.dit_tts.config.speed_checks import validate_speed
from torchtitan.models.dit_tts.data.build import check_settings
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.hf_encoder import CONFIG_FILE, is_pretrained
from torchtitan.models.dit_tts.text.vocabulary import FIELDS
from torchtitan.tools.utils import device_type


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def data_parallel_degree(config: JobConfig, world_size: int) -> int:
    """Ranks that see different data: replicas times shards.

    Raises:
        InputError: degrees below one or that do not multiply to the number of processes.
    """
    p = config.parallelism
    degrees = {
        "data_parallel_replicate_degree": p.data_parallel_replicate_degree,
        "data_parallel_shard_degree": p.data_parallel_shard_degree,
    }
    for name, degree in degrees.items():
        lowest = "-1 or at least 1" if name.endswith("shard_degree") else "at least 1"
        _require(
            degree >= 1 or (degree == -1 and name.endswith("shard_degree")),
            f"[parallelism] {name} = {degree} is not a degree; it must be {lowest}",
        )
    for name in (
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
        "expert_parallel_degree",
    ):
        _require(
            getattr(p, name) == 1,
            f"[parallelism] {name} = {getattr(p, name)} is not supported by this model family; "
            f"set it to 1 and use data_parallel_shard_degree or data_parallel_replicate_degree",
        )
    shard = p.data_parallel_shard_degree
    replicate = p.data_parallel_replicate_degree
    if shard == -1:
        _require(
            world_size % replicate == 0,
            f"[parallelism] data_parallel_replicate_degree = {replicate} does not divide the "
            f"{world_size} processes that were started; choose a divisor of {world_size}",
        )
        shard = world_size // replicate
    _require(
        replicate * shard == world_size,
        f"[parallelism] data_parallel_replicate_degree {replicate} x data_parallel_shard_degree "
        f"{shard} = {replicate * shard}, but {world_size} processes were started; their product "
        f"must be {world_size} (NGPU sets the number of processes)",
    )
    return replicate * shard


def accumulation_steps(config: JobConfig, dp_degree: int) -> int:
    """Micro-batches a step.

    Raises:
        InputError: a global batch that ranks and local batch do not divide.
    """
    t = config.training
    _require(
        t.local_batch_size >= 0,
        f"[training] local_batch_size = {t.local_batch_size} must be at least 1, or 0 for the global "
        f"batch divided by the ranks",
    )
    if t.local_batch_size == 0:
        _require(
            t.global_batch_size > 0 and t.global_batch_size % dp_degree == 0,
            f"[training] global_batch_size = {t.global_batch_size} is not a multiple of {dp_degree} "
            f"data-parallel ranks, as local_batch_size = 0 needs; change one of them",
        )
        return 1
    if t.global_batch_size < 0:
        return 1
    per_pass = t.local_batch_size * dp_degree
    _require(
        t.global_batch_size >= per_pass and t.global_batch_size % per_pass == 0,
        f"[training] global_batch_size = {t.global_batch_size} is not a multiple of "
        f"local_batch_size {t.local_batch_size} x {dp_degree} data-parallel ranks = {per_pass}; "
        f"change one of them",
    )
    return t.global_batch_size // per_pass


def validate_config(
    config: JobConfig, world_size: int, flavors: list[str], accelerator: str | None = None
) -> None:
    """Raises InputError at the first setting that cannot work, in one sentence.

    Args:
        config: the run's.
        world_size: its processes.
        flavors: names of the model's.
        accelerator: torch's name of the kind that it runs on; None: this machine's.
    """
    _require(
        config.model.name == "dit_tts",
        f"[model] name = {config.model.name!r}: train.py trains only 'dit_tts'",
    )
    _require(
        config.model.flavor in flavors,
        f"[model] flavor = {config.model.flavor!r} is not known; allowed are {', '.join(flavors)}",
    )
    _require(
        "/" not in config.job.experiment and config.job.experiment not in (".", ".."),
        f"[job] experiment = {config.job.experiment!r} must be a folder's name without '/'",
    )
    dp_degree = data_parallel_degree(config, world_size)
    steps = accumulation_steps(config, dp_degree)
    _require(
        config.data.batch_multiple % (dp_degree * steps) == 0,
        f"[data] batch_multiple = {config.data.batch_multiple} cannot be divided among {dp_degree} "
        f"data-parallel ranks x {steps} accumulation steps; set it to a multiple of "
        f"{dp_degree * steps} that divides global_batch_size",
    )
    _validate_numbers(config)
    t = config.training
    check_settings(
        config.data,
        t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * dp_degree,
    )
    _validate_tokens(config)
    _validate_attention(config, accelerator or device_type)
    _validate_benchmark(config)
    check_kind(config.sampling.codec, config.data.path)
    _validate_unsupported(config, dp_degree)
    checkpoint = config.checkpoint
    _require(
        not checkpoint.create_seed_checkpoint or (checkpoint.enable and world_size == 1),
        f"[checkpoint] create_seed_checkpoint = true with {world_size} processes and enable = "
        f"{str(checkpoint.enable).lower()}; it needs 1 process and enable = true",
    )
    _require(
        checkpoint.folder not in ("", ".", "..") and "/" not in checkpoint.folder,
        f"[checkpoint] folder = {checkpoint.folder!r} must be a folder's name without '/'; it lies in "
        f"the run's folder",
    )
    resumes = (run_folder_path(config) / checkpoint.folder).exists()
    _require(
        not checkpoint.initial_load_path or resumes or os.path.isdir(checkpoint.initial_load_path),
        f"[checkpoint] initial_load_path = {checkpoint.initial_load_path!r} is not a folder; give "
        f"that of one checkpoint, for example outputs/NAME/checkpoint/step-1000",
    )
    _require(
        not config.validation.enable,
        "[validation] enable = true is not supported by this model family; set it to false",
    )
    ac = config.activation_checkpoint
    _require(
        ac.mode != "selective"
        or ac.selective_ac_option == "op"
        or (ac.selective_ac_option.isdigit() and int(ac.selective_ac_option) > 0),
        f"[activation_checkpoint] selective_ac_option = {ac.selective_ac_option!r}; allowed are "
        f"'op' or N, for every Nth block",
    )
    validate_speed(config, dp_degree, steps)


def _validate_tokens(config: JobConfig) -> None:
    """The text encoder and the conditioning tokens."""
    encoder, data = config.encoder, config.data
    pretrained = is_pretrained(encoder.model)
    _require(
        not pretrained
        or os.path.isdir(encoder.model)
        or encoder.model.count("/") == 1
        or (run_folder_path(config) / CONFIG_FILE).is_file(),  # a run goes on without the folder
        f"[encoder] model = {encoder.model!r} is not known; allowed are 'bytes' and 'chars', the units "
        f"of the learned text encoder, a folder of a pretrained one, or a name of the Hugging Face hub "
        f"such as 'google/t5gemma-2-270m-270m'",
    )
    _require(
        not encoder.cache_features or (pretrained and encoder.frozen),
        f"[encoder] cache_features = true with model = {encoder.model!r} and frozen = "
        f"{str(encoder.frozen).lower()}; only a frozen pretrained encoder's features can be kept: set "
        f"cache_features = false",
    )
    _require(
        encoder.vocab_size >= 0,
        f"[encoder] vocab_size = {encoder.vocab_size} must not be negative; 0 takes the tokenizer's",
    )
    for name in data.conditioning:
        _require(
            name in FIELDS,
            f"[data] conditioning has {name!r}, which is not known; allowed are {', '.join(FIELDS)}",
        )
        _require(
            data.conditioning.count(name) == 1,
            f"[data] conditioning = {data.conditioning} has {name!r} more than once; name each field "
            f"once",
        )
    _require(
        "duration" not in data.conditioning
        or data.duration_token_seconds * data.frames_per_second >= 1,
        f"[data] duration_token_seconds = {data.duration_token_seconds} must be at least one frame, "
        f"1 / [data] frames_per_second = {1 / data.frames_per_second:g} s",
    )
    _require(
        data.max_text_tokens > 2 + len(data.conditioning),
        f"[data] max_text_tokens = {data.max_text_tokens} has no room for text beside begin, end and "
        f"{len(data.conditioning)} conditioning tokens; raise it",
    )


def _validate_attention(config: JobConfig, accelerator: str) -> None:
    """What an accelerator's kernels cannot do; the CPU has stand-ins for them."""
    backend, precision = config.attention.backend, config.training.mixed_precision_param
    if accelerator == "cpu":
        return
    _require(
        backend != "flex" or (config.compile.enable and "model" in config.compile.components),
        "[attention] backend = 'flex' needs [compile] enable = true with 'model' among its components: "
        "uncompiled it holds the scores of all queries and keys; compile, or choose sdpa or varlen",
    )
    _require(
        backend != "varlen" or precision == "bfloat16",
        f"[attention] backend = 'varlen' needs [training] mixed_precision_param = 'bfloat16', not "
        f"{precision!r}: flash attention has no other; set it, or choose sdpa",
    )


def _validate_benchmark(config: JobConfig) -> None:
    benchmark, encoder = config.benchmark, config.encoder
    if not benchmark.enable:
        return
    for key in ("steps", "duration_seconds"):
        value = getattr(benchmark, key)
        _require(value >= 0, f"[benchmark] {key} = {value} must not be negative")
    _require(
        benchmark.steps > 0 or benchmark.duration_seconds > 0,
        "[benchmark] enable = true with steps = 0 and duration_seconds = 0 would never end; set one of "
        "them",
    )
    for key in ("warmup_steps", "mean_seconds", "sigma"):
        value = getattr(benchmark, key)
        _require(value > 0, f"[benchmark] {key} = {value} must be greater than 0")
    _require(
        not is_pretrained(encoder.model) or encoder.frozen,
        f"[benchmark] enable = true with [encoder] model = {encoder.model!r} and frozen = false is not "
        f"supported: its weights would have to be loaded; set frozen = true",
    )


def _validate_unsupported(config: JobConfig, dp_degree: int) -> None:
    """Settings of upstream's that this family would ignore or break on."""
    c, sharded = config.checkpoint, dp_degree > config.parallelism.data_parallel_replicate_degree
    for key, wrong, allowed in (
        ("[optimizer] early_step_in_backward", config.optimizer.early_step_in_backward, "false"),
        ("[metrics] save_for_all_ranks", config.metrics.save_for_all_ranks, "false"),
        ("[checkpoint] last_save_in_hf", c.last_save_in_hf, "false"),
        ("[checkpoint] initial_load_in_hf", c.initial_load_in_hf, "false"),
        ("[validation] enable", config.validation.enable, "false"),
        ("[fault_tolerance] enable", config.fault_tolerance.enable, "false"),
        (
            "[training] enable_cpu_offload",
            config.training.enable_cpu_offload and not sharded,
            "false unless weights are sharded over several GPUs (data_parallel_shard_degree)",
        ),
    ):
        _require(
            not wrong, f"{key} = true is not supported by this model family; set it to {allowed}"
        )


def validate_machine(config: JobConfig) -> None:
    """Raises InputError where this machine cannot train what the config says; a plan or a dry run may
    be made on another."""
    _require(
        device_type != "cpu" or not config.training.enable_cpu_offload,
        "[training] enable_cpu_offload = true needs an accelerator to offload from; set it to false",
    )
    _require(
        device_type != "cpu" or config.checkpoint.async_mode != "async_with_pinned_mem",
        "[checkpoint] async_mode = 'async_with_pinned_mem' needs an accelerator; on this machine set "
        "it to 'async' or 'disabled'",
    )


def _validate_numbers(config: JobConfig) -> None:
    d, o = config.data, config.objective
    positive = {
        "[training] steps": config.training.steps,
        "[metrics] log_freq": config.metrics.log_freq,
        "[checkpoint] interval": config.checkpoint.interval,
        "[data] max_frames": d.max_frames,
        "[data] max_speaker_frames": d.max_speaker_frames,
        "[data] max_text_tokens": d.max_text_tokens,
        "[data] batch_multiple": d.batch_multiple,
        "[data] latent_channels": d.latent_channels,
        "[data] frames_per_second": d.frames_per_second,
        "[data] duration_token_seconds": d.duration_token_seconds,
        "[sampling] steps": config.sampling.steps,
        "[objective] logit_std": o.logit_std,
        "[training] max_norm": config.training.max_norm,
    }
    for key, value in positive.items():
        _require(value > 0, f"{key} = {value} must be greater than 0")
    for key, value in {
        "[data] epochs": d.epochs,
        "[data] cache_gib": d.cache_gib,
        "[data] num_workers": d.num_workers,
        "[data] prefetch_batches": d.prefetch_batches,
        "[optimizer] lr": config.optimizer.lr,
        "[optimizer] encoder_lr": config.optimizer.encoder_lr,
        "[encoder] fsdp_min_gib": config.encoder.fsdp_min_gib,
        "[lr_scheduler] warmup_steps": config.lr_scheduler.warmup_steps,
    }.items():
        _require(value >= 0, f"{key} = {value} must not be negative")
    for key, value, most in (
        ("[data] max_frames", d.max_frames, 10**6),
        ("[data] max_speaker_frames", d.max_speaker_frames, 10**6),
        ("[data] epochs", d.epochs, 10**6),
        ("[data] cache_gib", d.cache_gib, 10**6),
    ):
        _require(value <= most, f"{key} = {value} is too large; at most {most} is allowed")
    for key, value in {
        "[data] conditioning_dropout": d.conditioning_dropout,
        "[objective] text_dropout": o.text_dropout,
        "[objective] speaker_dropout": o.speaker_dropout,
        "[ema] decay": config.ema.decay,
        "[sampling] min_t": config.sampling.min_t,
    }.items():
        _require(0 <= value <= 1, f"{key} = {value} must lie between 0 and 1")
    _require(
        config.checkpoint.keep_latest_k != 1,
        "[checkpoint] keep_latest_k = 1 could leave no whole checkpoint after a crash; allowed are "
        "0, which keeps all, or at least 2",
    )
