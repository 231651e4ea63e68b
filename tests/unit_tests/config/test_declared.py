"""The sections declare each key as recorded: the defaults that matter, and marks.

A default that changes is another run for whoever does not give the key, and for a checkpoint that is older
than the key it is what it was trained with.
"""

import json
from dataclasses import asdict
from operator import attrgetter

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.keys import declared, marked
from torchtitan.models.dit_tts.config.manager import config_from_dict, parse_config
from torchtitan.models.dit_tts.config.marks import UNUSED, Mark

DEFAULTS = """
[data] path="" allow_heldout=false weights=[] balance_by="" balance_beta=0.999
use_sample_weights=false duration_alpha=0.0 epochs=0
on_error="raise" max_corrupt_fraction=0.01 seed=0 latent_channels=128 frames_per_second=25.0
max_frames=768 max_speaker_frames=384 max_reference_ratio=1.0 references="stored"
speaker_patch_size=4 max_text_tokens=192 verbatim_fraction=0.0
max_caption_tokens=0 batching="buckets" longest_per_row=4 num_buckets=8 bucket_frames=[] batch_multiple=8
max_dropped_fraction=0.1 num_workers=2 prefetch_batches=4 conditioning=[]
conditioning_dropout=0.1 duration_token_seconds=0.5 audit=false
[encoder] model="bytes" added_tokens=[] convention="" normalize="" frozen=true dtype="bfloat16"
dim=0 n_layers=2 n_heads=4 vocab_size=0
[model] name="dit_tts" flavor="debug" sizes=[] text_positions="none"
[lora] rank=0 alpha=16.0
[attention] backend="auto"
[kernels] modulated_norm="definition"
[objective] prediction="velocity" time_distribution="logit_normal" logit_mean=0.0 logit_std=1.0
text_dropout=0.1 speaker_dropout=0.1 caption_dropout=0.1 loss_on_padding=false
[distill] teacher="" teacher_steps=4 passes=0 times=[]
[optimizer] name="AdamW" state_dtype="float32" muon_lr=0.0 base_dim=0 encoder_lr=1e-05
[training] local_batch_size=0 max_local_batch_size=0 global_batch_size=32
mixed_precision_reduce="float32"
[ema] enable=true decays=[0.9999]
[validation] enable=true path="" freq=500 samples=64 times=[0.99,0.95,0.9,0.8,0.6,0.4,0.2]
batch_size=16 seed=0 keep_best="best_heldout_loss"
[samples] freq=0 count=8 seed=0 recognizer="" speaker_scorer="" opinion=""
[sampling] steps=40 solver="euler" schedule="linear" start_t=1.0 sway=-1.0 text_scale=3.0
speaker_scale=0.0 caption_scale=0.0 guidance="independent" min_t=0.5 max_t=1.0
truncation_factor=1.0 rescale_k=1.0 rescale_sigma=1.0 speaker_kv_scale=1.0
speaker_kv_min_t=0.0 codec="mel_dct"
[checkpoint] enable=true last_save_model_only=false
[divergence] spike_sigmas=10.0 max_bad_steps=3 max_rollbacks=2
[parallelism] backend="torchtitan" tensor_parallel_degree=1
[megatron] transformer_impl="local" sequence_parallel=false use_te_attn=false fp8=false
[compile] components=["model","encoders"] mode="default" inductor=[]
[benchmark] enable=false steps=0 warmup_steps=3
lengths="mixed" mean_seconds=9.0 sigma=0.5
"""

OPTIMIZER = """optimizer.name,lr,beta1,beta2,eps,weight_decay,implementation,state_dtype,muon_lr
    optimizer.early_step_in_backward,base_dim,encoder_lr ema.enable,decays training.max_norm
    lr_scheduler.warmup_steps,total_steps,decay_ratio,decay_type,min_lr_factor"""
OBJECTIVE = """objective.prediction,time_distribution,logit_mean,logit_std,loss_on_padding
    objective.text_dropout,speaker_dropout,caption_dropout"""
MARKS = {
    "TRAINING": f"""{OPTIMIZER} {OBJECTIVE} model.converters data.verbatim_fraction,max_caption_tokens encoder.frozen
    lora.rank,alpha distill.teacher_steps,times,fingerprint megatron.fp8""",
    "WEIGHTS": "model.flavor,sizes,text_positions objective.prediction",
    "WORKLOAD": """model.sizes,text_positions training.enable_cpu_offload,mixed_precision_reduce
    compile.components ema.enable,decays
    data.batching,longest_per_row,num_buckets,bucket_frames,num_workers
    encoder.model,convention,normalize,frozen,dtype lora.rank distill.teacher_steps,passes
    megatron.transformer_impl,sequence_parallel,use_te_attn quantize.linear.float8.recipe_name""",
    "INPUT": """data.path,max_frames,max_speaker_frames,max_reference_ratio,max_text_tokens
    data.max_caption_tokens benchmark.mean_seconds""",
    "EXPORTED": f"""{OBJECTIVE} model.name,flavor,sizes,text_positions data.latent_channels
    data.frames_per_second,max_frames,max_speaker_frames,speaker_patch_size,max_text_tokens
    data.max_caption_tokens data.conditioning,conditioning_dropout,duration_token_seconds sampling.steps,solver,schedule
    encoder.model,added_tokens,convention,normalize,frozen,dtype,dim,n_layers,n_heads,vocab_size
    sampling.start_t,sway,text_scale,speaker_scale,caption_scale,guidance,min_t,max_t,codec
    sampling.truncation_factor,rescale_k,rescale_sigma
    sampling.speaker_kv_scale,speaker_kv_min_t""",
    "RECIPE": f"""{OPTIMIZER} training.global_batch_size,dtype,mixed_precision_param
    training.mixed_precision_reduce checkpoint.interval,keep_latest_k validation.freq,samples
    validation.times,batch_size,seed,keep_best
    data.batching,longest_per_row,num_buckets,batch_multiple""",
}


def named(keys: str) -> set[str]:
    """Names of a table: section.key,key section.key."""
    found = set()
    for word in keys.split():
        section, _, names = word.rpartition(".")
        found |= {f"{section}.{name}" for name in names.split(",")}
    return found


def test_defaults_are_the_recorded_ones():
    values = asdict(JobConfig())
    for words in map(str.split, DEFAULTS.strip().removeprefix("[").split("\n[")):
        for key, _, value in (word.partition("=") for word in words[1:]):
            assert values[words[0][:-1]][key] == json.loads(value), key


def test_every_key_is_read_as_it_is_written():
    """From a dictionary and from the command line."""
    config, options = JobConfig(), []
    assert config_from_dict(asdict(config), "x") == config
    for name in {name for name, _ in declared()} - set(marked(UNUSED)):
        value = attrgetter(name)(config)
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        options.append(f"--{name}={text}")
    assert parse_config(options) == config


def test_marks_are_the_recorded_ones():
    for mark, keys in MARKS.items():
        assert set(marked(Mark[mark])) == named(keys), mark
