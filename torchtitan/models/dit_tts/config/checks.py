"""Checks a config against itself and the machine before anything is built or opened."""

from operator import attrgetter

import torchtitan.config.job_config as titan
from torchtitan.models.dit_tts.config.batch_split import batch_split, data_parallel_degree
from torchtitan.models.dit_tts.config.data_checks import (
    check_data,
    check_packed,
    check_text,
)
from torchtitan.models.dit_tts.config.duration_checks import check_duration
from torchtitan.models.dit_tts.config.exported import check_initial_weights
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.keys import check_numbers, marked, settings
from torchtitan.models.dit_tts.config.lora_checks import check_lora
from torchtitan.models.dit_tts.config.manager import run_folder_path
from torchtitan.models.dit_tts.config.marks import OFF
from torchtitan.models.dit_tts.config.megatron_checks import check_megatron
from torchtitan.models.dit_tts.config.old_keys import OLD_KEYS
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling
from torchtitan.models.dit_tts.config.speed_checks import (
    check_attention,
    check_benchmark,
    check_compile,
    check_float8,
    check_optimizer,
    check_profiling,
)
from torchtitan.models.dit_tts.config.validation_figures import (
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
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
    _check_unsupported(config)
    decays = config.ema.decays
    require(
        len(set(map(decay_name, decays))) == len(decays) > 0,
        f"[ema] decays = {decays}, but it must be one or more different numbers (of 10 digits)",
    )
    flavor = config.model.flavor
    meant = [f" did you mean {each}?" for each in flavors if each.lower() == flavor.lower()]
    require(
        flavor in flavors,
        f"[model] flavor = {flavor!r} is not known;{''.join(meant)} allowed are {', '.join(flavors)}",
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
        f"[job] dump_folder = {config.job.dump_folder!r} is no path; give the path of a folder",
    )
    dp_degree = data_parallel_degree(config, world_size)
    global_batch, steps = batch_split(config.training, dp_degree)
    check_data(config.data, global_batch, dp_degree, steps)
    check_packed(config, global_batch, dp_degree * steps)
    check_text(config)
    check_sampling(config.sampling)
    check_attention(config, accelerator or device_type)
    check_profiling(config, accelerator or device_type)
    check_benchmark(config)
    _check_checkpoint(config, world_size)
    _check_validation(config)
    check_compile(config, dp_degree, steps)
    check_megatron(config, accelerator or device_type)
    check_optimizer(config, dp_degree)
    check_float8(config)
    check_duration(config)
    check_lora(config)


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
    if config.parallelism.backend == "megatron":
        require_modules("megatron")
    if config.megatron.transformer_impl == "transformer_engine":
        require_modules("transformer_engine")
    if config.samples.freq:
        require_modules("soundfile", "matplotlib")
        require_modules(*(("jiwer", "transformers") if config.samples.recognizer else ()))


def _check_unsupported(config: JobConfig) -> None:
    for name in marked(OFF):
        require(
            not attrgetter(name)(config),
            f"{settings(config, name)} is not supported by this model family; set it to false",
        )
    length = config.training.seq_len
    require(
        length == titan.Training.seq_len, f"[training] seq_len = {length}: {OLD_KEYS['seq_len']}"
    )


def _check_validation(config: JobConfig) -> None:
    validation, samples = config.validation, config.samples
    require(
        len(set(validation.times)) == len(validation.times) > 0,
        f"{settings(config, 'validation.times')}, but it must be one or more different times",
    )
    figure = validation.keep_best
    require(
        not figure
        or figure in measured_figures(config)
        or (not validation.enable and is_higher_better(figure) is not None),
        f"[validation] keep_best = {figure!r} is no figure that is measured; allowed are "
        f"{', '.join((*LOWER_IS_BETTER, *HIGHER_IS_BETTER))}, at one of times such as heldout_loss_at_0.9, "
        f"of certain weights such as heldout_loss_raw, or an empty string; figures of speech need [samples] "
        f"freq and what measures them",
    )
    require(
        samples.freq == 0 or (validation.enable and bool(validation.path)),
        f"[samples] freq = {samples.freq}, but there are no held-out texts to synthesize: set [validation] "
        f"enable = true and give its path, or set freq = 0",
    )


def _check_checkpoint(config: JobConfig, world_size: int) -> None:
    checkpoint = config.checkpoint
    require(
        not checkpoint.create_seed_checkpoint or (checkpoint.enable and world_size == 1),
        f"[checkpoint] create_seed_checkpoint = true with {world_size} processes and enable = "
        f"{str(checkpoint.enable).lower()}; it needs 1 process and enable = true",
    )
    require(
        checkpoint.enable or not checkpoint.initial_load_path,
        f"[checkpoint] initial_load_path = {checkpoint.initial_load_path!r} with enable = false, which loads "
        f"and saves nothing; set enable = true",
    )
    require(
        checkpoint.folder not in ("", ".", "..") and "/" not in checkpoint.folder,
        f"[checkpoint] folder = {checkpoint.folder!r} must be a folder's name without '/'; it lies in "
        f"the run folder",
    )
    resumes = (run_folder_path(config) / checkpoint.folder).exists()
    if checkpoint.initial_load_path and not resumes:
        check_initial_weights(checkpoint)
    require(
        checkpoint.keep_latest_k != 1,
        "[checkpoint] keep_latest_k = 1 could leave no complete checkpoint after a crash; allowed are "
        "0, which keeps all, or at least 2",
    )
