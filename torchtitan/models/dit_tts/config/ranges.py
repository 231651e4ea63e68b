"""Which values the numbers of a config may have, each by itself, and switches that must stay off."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import torchtitan.config.job_config as titan
from torchtitan.models.dit_tts.config.job_config import BAD_STEPS_WINDOW, JobConfig
from torchtitan.models.dit_tts.config.old_keys import OLD_KEYS
from torchtitan.models.dit_tts.config.validation_figures import decay_name
from torchtitan.models.dit_tts.errors import require

_POSITIVE = {
    "training": "steps max_norm",
    "metrics": "log_freq",
    "checkpoint": "interval",
    "encoder": "n_layers n_heads",
    "optimizer": "eps",
    "comm": "init_timeout_seconds train_timeout_seconds",
    "data": "max_frames max_speaker_frames max_text_tokens batch_multiple latent_channels "
    "speaker_patch_size frames_per_second duration_token_seconds",
    "validation": "freq samples batch_size",
    "samples": "count",
    "objective": "logit_std",
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
    "alignment": "ctc_weight ctc_layer",
}
_FRACTIONS = {
    "data": "conditioning_dropout max_corrupt_fraction max_dropped_fraction",
    "objective": "text_dropout speaker_dropout",
    "optimizer": "beta1 beta2",
    "lr_scheduler": "min_lr_factor",
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


def check_ranges(config: JobConfig) -> None:
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
        len(set(map(decay_name, decays))) == len(decays) > 0
        and all(0 <= decay <= 1 for decay in decays),
        f"[ema] decays = {decays}, but it must be one or more different numbers from 0 to 1 (of 10 digits)",
    )
    bad_steps = config.divergence.max_bad_steps
    require(
        bad_steps < BAD_STEPS_WINDOW,
        f"[divergence] max_bad_steps = {bad_steps}, but it must be less than {BAD_STEPS_WINDOW}, the steps "
        f"among which they are counted",
    )
    for name, value in settings(_UNSUPPORTED):
        require(not value, f"{name} = true is not supported by this model family; set it to false")
    # Upstream's, where other trainers' configs have it.
    length = config.training.seq_len
    require(
        length == titan.Training.seq_len, f"[training] seq_len = {length}: {OLD_KEYS['seq_len']}"
    )
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
