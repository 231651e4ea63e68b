"""Keys of other trainers of this kind and of earlier configs, and what to write instead.

They are refused like any unknown key, with this sentence.
"""

from typing import Any

_RENAMED = """
framework: parallelism.backend
tensor_parallel_size tensor_parallel_degree tp tp_size: parallelism.tensor_parallel_degree
data_parallel_replicate_degree: parallelism.data_parallel_replicate_degree
data_parallel_shard_degree: parallelism.data_parallel_shard_degree
remat activation_checkpointing gradient_checkpointing: activation_checkpoint.mode
duration_seconds: benchmark.steps
model_size scale: model.flavor
seq_len max_latent_length: data.max_frames
mixed_precision amp_dtype precision: training.mixed_precision_param
compile: compile.enable
use_te_attn: megatron.use_te_attn
transformer_impl: megatron.transformer_impl
warmup_steps num_warmup_updates: lr_scheduler.warmup_steps
enable_checkpoint: checkpoint.enable
model_weights_only: checkpoint.last_save_model_only
learning_rate lr: optimizer.lr
weight_decay: optimizer.weight_decay
max_steps num_steps: training.steps
epochs: data.epochs
max_grad_norm grad_clip: training.max_norm
micro_batch_size batch_size_per_gpu: training.local_batch_size
save_every: checkpoint.interval
num_workers: data.num_workers
text_condition_dropout: objective.text_dropout
speaker_condition_dropout audio_drop_prob: objective.speaker_dropout
encoder_model: encoder.model
frozen_encoder: encoder.frozen
fused_optimizer: optimizer.implementation
max_text_length: data.max_text_tokens
max_speaker_length: data.max_speaker_frames
"""
"""Names -> section.key"""

OLD_KEYS = {
    name: "use [{}] {}".format(*key.rsplit(".", 1))
    for names, _, key in (line.partition(": ") for line in _RENAMED.strip().splitlines())
    for name in names.split()
} | {
    "patch_size": "leave it out: latents are not patched",
    "batch_size": "use [training] global_batch_size, and local_batch_size for one rank's micro-batch",
    "gradient_accumulation_steps": "set [training] local_batch_size: global_batch_size / (local_batch_size × ranks) are the accumulation steps",
    "grad_accumulation_steps": "set [training] local_batch_size: global_batch_size / (local_batch_size × ranks) are the accumulation steps",
    "enable_float8_linear": 'use [model] converters = ["float8"]',
    "float8": 'use [quantize.linear.float8], and [model] converters = ["float8"]',
    "parallelism": "use [parallelism] data_parallel_shard_degree (FSDP) or data_parallel_replicate_degree (DDP); both are HSDP",
    "num_nodes": "start the processes by titan-tts train --nodes or scripts/train_tts.slurm; [parallelism] data_parallel_shard_degree divides them",
    "num_gpus": "start the processes by titan-tts train --nproc or torchrun; [parallelism] data_parallel_shard_degree divides them",
    "compile_mode": "use [compile] mode, and [compile] enable",
    "ema_decay": "use [ema] decays, a list",
    "cond_drop_prob": "use [objective] text_dropout and [objective] speaker_dropout",
    "seed": "use [debug] seed for weights and noise, [data] seed for the order of the data",
    "t5_hidden_dim": "leave it out: [encoder] model has its width",
    "time_shift": "leave it out, and add its natural logarithm to [objective] logit_mean",
    "logit_mean_end": "leave it out: on sentences it is no better than a constant logit_mean",
    "batch_ramp": "leave it out: every step trains on a whole global batch",
    "bucket_batch_sizes": "leave it out: every bucket has as many frames as the longest, which [training] global_batch_size sets",
    "duration_offset_seconds": "leave it out: samples are drawn by a power of their duration alone",
    "on_too_long": "leave it out: samples over the limits are left out, of which [data] max_dropped_fraction allows a part",
    "alignment": "leave it out, and set [model] text_positions = 'aligned'",
}
"""name, in any section -> what to do instead"""

REMOVED: dict[str, Any] = {
    "benchmark.duration_seconds": 0.0,
    "objective.time_shift": 1.0,
    "objective.logit_mean_end": None,
    "training.batch_ramp": [],
    "data.bucket_batch_sizes": [],
    "data.on_too_long": "drop",
    "data.duration_offset_seconds": 0.0,
    "alignment.teacher": "",
    "alignment.teacher_weight": 0.5,
    "alignment.teacher_layer": 0,
    "alignment.teacher_hidden_layer": 0,
    "alignment.teacher_dim": 256,
    "alignment.stop_fraction": 0.5,
    "alignment.ctc_weight": 0.0,
    "alignment.ctc_layer": 0,
}
"""section.key that runs of earlier versions recorded -> the value that changes nothing, which is still read"""

WITHOUT_EFFECT = {
    *("data.cache_folder", "data.cache_gib", "training.batch_ramp_steps", "benchmark.profile"),
    *("samples.raw", "compile.cache_folder", "encoder.cache_features", "encoder.cache_dtype"),
    *("parallelism.fsdp_blocks_per_unit", "parallelism.fsdp_prefetch_units"),
    *("encoder.fsdp_min_gib", "sampling.cfg_zero_star", "sampling.zero_init_steps"),
}
"""section.key of earlier versions that changed no result; still read, whatever the value"""

OLD_VALUES: dict[str, Any] = {
    "attention.backend = flex": "auto",  # all backends compute the same
    "sampling.schedule = epss": "sway",  # whose steps it pruned
    "optimizer.state_dtype = bfloat16": "float32",  # which computed the update
}
"""section.key = value of an earlier version -> the value that is read instead"""


def changes_nothing(key: str, value: Any) -> bool:
    """Says whether this version can do without `section.key = value` of an earlier version's config."""
    return key in WITHOUT_EFFECT or REMOVED.get(key, ...) == value
