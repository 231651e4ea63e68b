"""Checks a config against itself and the machine before anything is built or opened."""

import os
from operator import attrgetter

import torch

import torchtitan.config.job_config as titan
from torchtitan.models.dit_tts.config.batch_split import batch_split, data_parallel_degree
from torchtitan.models.dit_tts.config.data_checks import check_data, check_packed, check_text
from torchtitan.models.dit_tts.config.exported import check_initial_weights
from torchtitan.models.dit_tts.config.job_config import JobConfig, graphed_components
from torchtitan.models.dit_tts.config.keys import check_numbers, conflict, marked
from torchtitan.models.dit_tts.config.manager import run_folder_path
from torchtitan.models.dit_tts.config.marks import OFF
from torchtitan.models.dit_tts.config.model_checks import check_duration, check_lora, check_megatron
from torchtitan.models.dit_tts.config.old_keys import OLD_KEYS
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling
from torchtitan.models.dit_tts.config.speed_checks import (
    check_accelerator,
    check_benchmark,
    check_compile,
    check_float8,
    check_optimizer,
)
from torchtitan.models.dit_tts.config.validation_figures import (
    FIGURES,
    decay_name,
    is_higher_better,
    measured_figures,
)
from torchtitan.models.dit_tts.errors import require, require_modules
from torchtitan.tools.utils import device_type

MAX_NAME_BYTES = 255
"""of a file's name, on all usual file systems"""


def validate_config(
    config: JobConfig, world_size: int, flavors: list[str], accelerator: str | None = None
) -> None:
    """Raises InputError at the first setting that cannot work. `accelerator`: torch's name of the
    kind of device it runs on; None: this machine's.
    """
    check_numbers(config)
    for name in marked(OFF):
        if attrgetter(name)(config):
            raise conflict(
                config, name, "it is not supported by this model family; set it to false"
            )
    if config.training.seq_len != titan.Training.seq_len:
        raise conflict(config, "training.seq_len", OLD_KEYS["seq_len"])
    decays = config.ema.decays
    if not 0 < len(decays) == len(set(map(decay_name, decays))):
        why = "it must be one or more different numbers (of 10 digits)"
        raise conflict(config, "ema.decays", why)
    flavor = config.model.flavor
    if flavor not in flavors:
        meant = [f"did you mean {each}? " for each in flavors if each.lower() == flavor.lower()]
        why = f"it is not known; {''.join(meant)}allowed are {', '.join(flavors)}"
        raise conflict(config, "model.flavor", why)
    _check_name(config, "job.experiment")
    dp_degree = data_parallel_degree(config, world_size)
    global_batch, steps = batch_split(config.training, dp_degree)
    check_data(config, global_batch, dp_degree, steps)
    check_packed(config, global_batch, dp_degree * steps)
    check_text(config)
    check_sampling(config.sampling)
    check_accelerator(config, accelerator or device_type)
    check_benchmark(config)
    _check_checkpoint(config, world_size)
    _check_validation(config)
    check_compile(config, dp_degree)
    check_megatron(config, accelerator or device_type)
    check_optimizer(config, dp_degree)
    check_float8(config)
    check_duration(config)
    check_lora(config)


def validate_machine(config: JobConfig) -> None:
    """Raises InputError where this machine cannot train with the config. A plan does not call it."""
    local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    require(
        device_type != "cuda" or local < gpus,
        f"process {local} of this machine has no GPU of its own, as torch sees {gpus}; give --nproc {gpus}",
    )
    require(
        device_type != "cpu" or not config.training.enable_cpu_offload,
        "[training] enable_cpu_offload = true needs an accelerator to offload from; set it to false",
    )
    require(
        config.checkpoint.async_mode != "async_with_pinned_mem",
        "[checkpoint] async_mode = 'async_with_pinned_mem' is not known; set it to 'async' or 'disabled'",
    )
    require(  # torch leaves them out without a word
        device_type != "cpu" or not graphed_components(config),
        f"[compile] mode = {config.compile.mode!r} replays CUDA graphs, and there is no GPU; set it to 'default' or "
        "'max-autotune-no-cudagraphs'",
    )
    if config.parallelism.backend == "megatron":
        require_modules("megatron")
    if config.megatron.transformer_impl == "transformer_engine":
        require_modules("transformer_engine")
    if config.kernels.modulated_norm == "triton":
        require_modules("triton")
    if config.samples.freq:
        require_modules("soundfile", "matplotlib")
        require_modules(*(("jiwer", "transformers") if config.samples.recognizer else ()))


def _check_name(config: JobConfig, key: str) -> None:
    name = attrgetter(key)(config)
    usable = "/" not in name and name.strip() not in ("", ".", "..") and name.isprintable()
    if not usable or len(name.encode()) > MAX_NAME_BYTES:
        why = (
            f"it must be a folder's name without '/', printable and at most {MAX_NAME_BYTES} bytes"
        )
        raise conflict(config, key, why)


def _check_validation(config: JobConfig) -> None:
    validation, samples = config.validation, config.samples
    if not 0 < len(validation.times) == len(set(validation.times)):
        raise conflict(config, "validation.times", "it must be one or more different times")
    figure = validation.keep_best
    if figure not in ("", *measured_figures(config)) and (
        validation.enable or is_higher_better(figure) is None
    ):
        allowed = ", ".join(name for name, (*_, better) in FIGURES.items() if better is not None)
        why = (
            f"it is not a measured figure; allowed are {allowed}, "
            f"at one of times such as heldout_loss_at_0.9, of certain weights such as heldout_loss_raw, or an empty "
            f"string; figures of speech need [samples] freq and what measures them"
        )
        raise conflict(config, "validation.keep_best", why)
    if samples.freq and not (validation.enable and validation.path):
        why = (
            "there are no held-out texts to synthesize; set [validation] enable = true and give its path, or set "
            "freq = 0"
        )
        raise conflict(config, "samples.freq", why)


def _check_checkpoint(config: JobConfig, world_size: int) -> None:
    checkpoint = config.checkpoint
    if checkpoint.create_seed_checkpoint and not (checkpoint.enable and world_size == 1):
        why = f"it needs 1 process and enable = true, but there are {world_size} processes"
        raise conflict(config, "checkpoint.create_seed_checkpoint checkpoint.enable", why)
    if checkpoint.initial_load_path and not checkpoint.enable:
        why = "nothing is loaded and saved; set enable = true"
        raise conflict(config, "checkpoint.initial_load_path checkpoint.enable", why)
    _check_name(config, "checkpoint.folder")
    resumes = (run_folder_path(config) / checkpoint.folder).exists()
    if checkpoint.initial_load_path and not resumes:
        check_initial_weights(checkpoint)
    if checkpoint.keep_latest_k == 1:
        why = "a crash could leave no complete checkpoint; allowed are 0, which keeps all, or at least 2"
        raise conflict(config, "checkpoint.keep_latest_k", why)
