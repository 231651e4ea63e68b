"""Checks of [adapter]."""

from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig, is_pretrained
from torchtitan.models.dit_tts.errors import require


def check_adapter(config: JobConfig) -> None:
    adapter, checkpoint = config.adapter, config.checkpoint
    if adapter.kind == "none":
        return
    given = f"[adapter] kind = {adapter.kind!r}"
    starts = checkpoint.initial_load_path and checkpoint.initial_load_model_only
    require(
        bool(starts) or config.benchmark.enable,
        f"{given} needs the weights that it is for: set [checkpoint] initial_load_path to an exported folder "
        f"or a checkpoint, and leave initial_load_model_only true",
    )
    learned_reference = adapter.kind == "reference"
    for refused, what, remedy in (
        (
            config.model.flavor == DURATION_FLAVOR,
            f"[model] flavor = {DURATION_FLAVOR!r}",
            "another flavor, or kind to 'none'",
        ),
        (config.optimizer.name == "Muon", "[optimizer] name = 'Muon'", "'AdamW'"),
        (config.optimizer.base_dim > 0, f"[optimizer] base_dim = {config.optimizer.base_dim}", "0"),
        (config.model.converters, f"[model] converters = {config.model.converters}", "[]"),
        (
            config.megatron.transformer_impl != "local",
            "[megatron] transformer_impl = 'transformer_engine'",
            "'local'",
        ),
        (config.megatron.sequence_parallel, "[megatron] sequence_parallel = true", "false"),
        (
            is_pretrained(config.encoder.model) and not config.encoder.frozen,
            "[encoder] frozen = false",
            "true",
        ),
        (
            learned_reference and config.data.batching == "packed",
            "[data] batching = 'packed'",
            "'buckets'",
        ),
        (
            learned_reference and adapter.frames > config.data.max_speaker_frames,
            f"[data] max_speaker_frames = {config.data.max_speaker_frames} and [adapter] frames = "
            f"{adapter.frames}, which is more,",
            "at least as many, or frames to fewer",
        ),
    ):
        require(not refused, f"{given} with {what} is not supported; set it to {remedy}")
