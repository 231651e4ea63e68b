"""Checks of [lora]."""

from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig, is_pretrained
from torchtitan.models.dit_tts.errors import require


def check_lora(config: JobConfig) -> None:
    if not config.lora.rank:
        return
    checkpoint, megatron, optimizer = config.checkpoint, config.megatron, config.optimizer
    given = f"[lora] rank = {config.lora.rank}"
    starts = checkpoint.initial_load_path and checkpoint.initial_load_model_only
    require(
        bool(starts) or config.benchmark.enable,
        f"{given} needs the weights that it is for: set [checkpoint] initial_load_path to an exported folder "
        f"or a checkpoint, and leave initial_load_model_only true",
    )
    trains_encoder = is_pretrained(config.encoder.model) and not config.encoder.frozen
    for refused, what, remedy in (
        (config.model.flavor == DURATION_FLAVOR, "[model] flavor = 'duration'", "another"),
        (optimizer.name == "Muon", "[optimizer] name = 'Muon'", "'AdamW'"),
        (optimizer.base_dim > 0, f"[optimizer] base_dim = {optimizer.base_dim}", "0"),
        (config.model.converters, f"[model] converters = {config.model.converters}", "[]"),
        (megatron.transformer_impl != "local", "TransformerEngine's layers", "'local'"),
        (megatron.sequence_parallel, "[megatron] sequence_parallel = true", "false"),
        (trains_encoder, "[encoder] frozen = false", "true"),
    ):
        require(not refused, f"{given} with {what} is not supported; set it to {remedy}")
