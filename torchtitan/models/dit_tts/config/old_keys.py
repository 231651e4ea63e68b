"""Keys of other trainers of this kind and of earlier configs, and what to write in their place.

They are refused like any unknown key; docs/old_keys.md has the same table.
"""

from collections.abc import Iterable

from torchtitan.models.dit_tts.errors import InputError

OLD_KEYS = {
    "framework": "use [parallelism] backend",
    "tensor_parallel_size": "use [parallelism] tensor_parallel_degree",
    "tensor_parallel_degree": "use [parallelism] tensor_parallel_degree",
    "data_parallel_replicate_degree": "use [parallelism] data_parallel_replicate_degree",
    "data_parallel_shard_degree": "use [parallelism] data_parallel_shard_degree",
    "remat": "use [activation_checkpoint] mode",
    "duration_seconds": "use [benchmark] duration_seconds",
    "model_size": "use [model] flavor",
    "patch_size": "leave it out: latents are not patched",
    "seq_len": "use [data] max_frames",
    "batch_size": "use [training] global_batch_size, and local_batch_size for one rank's micro-batch",
    "gradient_accumulation_steps": "set [training] local_batch_size: global_batch_size / (local_batch_size × "
    "ranks) are the accumulation steps",
    "mixed_precision": "use [training] mixed_precision_param",
    "amp_dtype": "use [training] mixed_precision_param",
    "enable_float8_linear": 'use [model] converters = ["float8"]',
    "float8": 'use [quantize.linear.float8], and [model] converters = ["float8"]',
    "compile": "use [compile] enable",
    "use_te_attn": "use [megatron] use_te_attn",
    "transformer_impl": "use [megatron] transformer_impl",
    "warmup_steps": "use [lr_scheduler] warmup_steps",
    "enable_checkpoint": "use [checkpoint] enable",
    "model_weights_only": "use [checkpoint] last_save_model_only",
}
"""name, in whatever section it was -> what to do instead"""


def option_name(arg: str) -> str:
    """section.key of an argument --section.key[=value]; empty for another."""
    return arg[2:].partition("=")[0].replace("-", "_") if arg.startswith("--") else ""


def refuse_old_options(names: Iterable[str]) -> None:
    """Raises InputError at the first of these unknown options that has a successor."""
    for name in names:
        if instead := OLD_KEYS.get(name.rpartition(".")[2].removeprefix("no_")):
            raise InputError(f"unknown option --{name}: {instead}")
