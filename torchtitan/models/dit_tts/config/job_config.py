"""The sections of our TOML in addition to upstream's, and the constants that checks use too.

A key is declared once. Beside its type stand the bounds of a number and the marks: whether a resume may
change it, and whether runs that differ in it do other work. `keys.py` reads them.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torchtitan.config.job_config as titan
from torchtitan.models.dit_tts.config.marks import (
    INPUT,
    TRAINING,
    WEIGHTS,
    WORKLOAD,
    Bounds,
    Fraction,
    Frames,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

PHONES = "phones"
LEARNED_UNITS = ("bytes", "chars", PHONES)
"""Units of text of the learned encoder inside the model; `[encoder] model` is one of them, with a language behind
the last: phones:en-us"""

LEARNED_SUBWORDS = "subwords:"
"""Begin of `[encoder] model` where the learned encoder reads the pieces of a pretrained tokenizer, whose folder or name
follows"""

CONDITIONING_FIELDS = ("speaker", "language", "quality", "class", "duration")
"""Values of `[data] conditioning`"""

MAX_BUCKETS = 8
"""Every bucket is a compiled shape"""

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Values of `[compile] mode` that replay kernels from CUDA graphs"""

DURATION_FLAVOR = "duration"
"""`[model] flavor` of the network that predicts the lengths of utterances"""

FLOAT8_CONVERTER = "float8"
"""Name of our fp8 converter in `[model] converters`"""

MAX_BETA2_BFLOAT16 = 0.999
"""Largest beta2 with moments in bfloat16, which has 8 significant bits: rounding leaves a second moment
right in the mean, with a deviation of 3 % at 0.999 that grows as 1/√(1 - beta2)"""


BAD_STEPS_WINDOW = 32
"""Steps among which `[divergence] max_bad_steps` counts"""

EVALUATIONS_PER_STEP = {"euler": 1, "midpoint": 2, "heun": 2}
"""of the velocity, in an interval of the schedule"""

EPSS_INTERVALS = (5, 6, 7, 10, 12, 16)
"""of [sampling] schedule = "epss" """

MAX_SWAY = 2 / (math.pi - 2)
"""Above it the times of sway sampling do not fall any more"""


def is_pretrained(encoder_model: str) -> bool:
    """True if `[encoder] model` names a pretrained encoder and not the learned one's unit."""
    learned = (f"{PHONES}:", LEARNED_SUBWORDS)
    return encoder_model not in ("bytes", "chars") and not encoder_model.startswith(learned)


@dataclass
class Job(titan.Job):
    experiment: str = ""
    """Name of the run's folder in dump_folder; empty: the config file's name without .toml"""


@dataclass
class Model(titan.Model):
    name: str = "dit_tts"
    """Model family to train"""

    flavor: Annotated[str, WEIGHTS] = "debug"
    """Size of the model: debug, 18M, 60M, 300M, 800M, 3B or 8B; or duration, which predicts
    durations instead of synthesizing speech"""

    sizes: Annotated[list[str], WEIGHTS, WORKLOAD] = field(default_factory=list)
    """Sizes that differ from the flavor's, such as dim=1536,n_layers=28: FIELD=NUMBER, true or false, with the
    fields of model/args.py that no other key sets"""

    text_positions: Annotated[Literal["none", "aligned"], WEIGHTS, WORKLOAD] = "none"
    """Positions of the text's keys in the attention's rotated heads: none, or each token at its
    frame, by an alignment in training and as expected from its letters in generation (aligned)"""

    hf_assets_path: str = "."
    """Not used by this family"""


@dataclass
class Metrics(titan.Metrics):
    log_freq: PositiveInt = 10
    """Steps from one logged step to the next"""

    enable_tensorboard: bool = True
    """Writes TensorBoard events to the run's tb/ folder"""

    enable_wandb: bool = False
    """Logs to Weights & Biases too, with the key in WANDB_API_KEY (from the environment or a file .env);
    not in a benchmark. Needs the extra wandb"""

    wandb_project: str = ""
    """Project at Weights & Biases; empty: WANDB_PROJECT, else titan-tts"""

    peak_tflops: float = 0.0
    """Dense bf16 peak of one device in TFLOP/s, the denominator of MFU; 0: the datasheet's value of a
    known device, and no MFU on an unknown one"""


@dataclass
class Checkpoint(titan.Checkpoint):
    enable: bool = True
    """Saves checkpoints and resumes from them; without them only a run's metrics are kept"""

    last_save_model_only: bool = False
    """True drops optimizer, EMA and data position from the last checkpoint, which then cannot be
    resumed"""


@dataclass
class Compile(titan.Compile):
    enable: bool = False
    """Compiles the components, one graph for each static shape"""

    components: Annotated[list[Literal["model", "encoders", "loss"]], WORKLOAD] = field(
        default_factory=lambda: ["model", "encoders"]  # type: ignore[assignment]
    )
    """Parts to compile: each block of the decoder (model), each block of the speaker encoder and of a
    trained text encoder (encoders), the noising and the loss (loss)"""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    """Mode of torch.compile; reduce-overhead and max-autotune replay CUDA graphs, on one GPU and
    without accumulation only"""

    cache_folder: str = ""
    """Where compiled kernels are kept between runs; empty: titan-tts/compile in the user's cache folder.
    The environment variable TORCHINDUCTOR_CACHE_DIR overrides it"""


@dataclass
class Parallelism(titan.Parallelism):
    backend: Literal["torchtitan", "megatron"] = "torchtitan"
    """Parallelization backend: data parallelism only (torchtitan), or also tensor
    parallelism by Megatron-Core's layers (megatron), which needs the extra megatron"""

    tensor_parallel_degree: int = 1
    """GPUs that share each block's heads and MLP units, with backend = "megatron"; must divide the flavor's
    heads: 1, 2 or 4 of 3B's 20 and 8B's 32, 1 or 2 of 800M's 10"""

    fsdp_blocks_per_unit: Annotated[PositiveInt, WORKLOAD] = 1
    """Decoder blocks whose weights are gathered, and whose gradients are reduced, in one collective (FSDP2,
    HSDP, DDP). More blocks: fewer and larger collectives, more memory"""

    fsdp_prefetch_units: Annotated[NonNegativeInt, WORKLOAD] = 0
    """Units of decoder blocks that FSDP2 and HSDP gather ahead, requested before the present one computes; each
    takes memory. 0: FSDP2's implicit prefetch of one"""


@dataclass
class Megatron:
    transformer_impl: Annotated[Literal["local", "transformer_engine"], WORKLOAD] = "local"
    """Layers of [parallelism] backend = "megatron": Megatron-Core's PyTorch layers (local), or
    TransformerEngine's, which need a GPU and the extra transformer-engine and do not compile"""

    sequence_parallel: Annotated[bool, WORKLOAD] = False
    """The GPUs of a tensor-parallel group also share the frames between a block's products: norms, gates and
    what they keep; sums become a gather and a reduce-scatter (Megatron's sequence parallelism)"""

    use_te_attn: Annotated[bool, WORKLOAD] = False
    """TransformerEngine's attention over packed keys, instead of flash attention ([attention]
    backend = "varlen")"""

    fp8: Annotated[bool, TRAINING] = False
    """TransformerEngine's layers multiply in fp8, with current scaling per tensor; the sizes of a GPU's
    part must be multiples of 16, to which rows are padded"""


@dataclass
class Optimizer(titan.Optimizer):
    name: str = "AdamW"
    """AdamW, Adam, or Muon: Muon for the large matrices of the decoder's blocks and AdamW for the rest"""

    state_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Precision of AdamW's two moments; 8bit needs torchao and leaves embeddings in float32"""

    muon_lr: NonNegativeFloat = 0.0
    """Learning rate of Muon, whose updates are scaled to AdamW's RMS; 0: lr"""

    base_dim: NonNegativeInt = 0
    """Decoder width at which lr and muon_lr were tuned: the learning rates of matrices that grow with the
    width are multiplied by base_dim / width (Muon's: by its square root), at constant rate times decay; 0: unscaled"""

    encoder_lr: NonNegativeFloat = 1e-5
    """Learning rate of a pretrained text encoder that is trained ([encoder] frozen = false)"""


@dataclass
class Training(titan.Training):
    local_batch_size: NonNegativeInt = 0
    """Samples of the longest bucket in one rank's micro-batch; 0: the global batch divided by the ranks,
    in as few micro-batches as max_local_batch_size allows"""

    max_local_batch_size: NonNegativeInt = 0
    """Largest micro-batch with local_batch_size = 0, so that one config suits few and many GPUs; 0: no
    limit, and no accumulation"""

    global_batch_size: int = 32
    """Samples of the longest bucket in a global batch; shorter buckets have more, up to as many frames"""

    mixed_precision_reduce: Annotated[Literal["float32", "bfloat16"], WORKLOAD] = "float32"  # type: ignore[assignment]
    """Precision in which gradients are summed over ranks (FSDP2, HSDP, DDP) and, where there are replicas, over
    micro-batches; bfloat16 halves the bytes"""


@dataclass
class Data:
    path: Annotated[str | list[str], INPUT] = ""
    """The shards: a folder of .tar files, one of them, a glob, a pattern with {000000..000099}, or a
    URL (s3://, http://, https:// ...) of one of these; or a list of them, one dataset each"""

    allow_heldout: bool = False
    """Allows path to name held-out shards, such as prepare's folder heldout, for training"""

    weights: list[float] = field(default_factory=list)
    """Sampling weight of each dataset in path, on any scale; empty: every sample once per epoch"""

    balance_by: Literal["", "speaker", "language", "quality", "class"] = ""
    """Key of the samples' JSON whose values are balanced within each dataset; empty: none"""

    balance_beta: Annotated[float, Bounds(0, 1, open_high=True)] = 0.999
    """Parameter β of the effective number (1 - β^n) / (1 - β) of a class of n samples: 0 keeps the
    classes as they are, values near 1 make them equally frequent"""

    use_sample_weights: bool = False
    """Draws samples in proportion to the "weight" in their JSON, from 1e-6 to 1e6, too; those without count 1"""

    duration_alpha: Annotated[float, Bounds(-10, 10)] = 0.0
    """Power α: samples are drawn in proportion to (duration + duration_offset_seconds)^α; 0:
    uniformly"""

    duration_offset_seconds: Annotated[float, Bounds(0, 3600)] = 0.0
    """Added to a sample's duration under duration_alpha, in seconds"""

    epochs: Annotated[int, Bounds(0, 10**6)] = 0
    """Passes over the data; sets [training] steps. 0: steps decides"""

    on_error: Literal["raise", "skip"] = "raise"
    """On a corrupt sample the run ends (raise), or another sample replaces it and it is counted
    (skip)"""

    max_corrupt_fraction: Fraction = 0.01
    """With on_error = "skip", fraction of corrupt samples above which the run ends"""

    seed: int = 0
    """Seed of the order, the parts of long references, the noise, the times and the condition dropout"""

    latent_channels: PositiveInt = 128
    """Width of a latent frame in the shards"""

    frames_per_second: PositiveFloat = 25.0
    """Latent frames per second of audio"""

    max_frames: Annotated[Frames, INPUT] = 768
    """Longest utterance, in latent frames"""

    max_speaker_frames: Annotated[Frames, INPUT] = 384
    """Longest speaker reference, in latent frames; longer ones are cropped, in training to another part
    at each draw"""

    max_reference_ratio: Annotated[float, Bounds(0, 10**6), INPUT] = 1.0
    """Longest reference of a bucket over its longest utterance (packed: of a sample over its own); longer
    ones are cropped, too. The longest bucket keeps whole references; 0: every bucket does. 1.0 mostly
    removes padding"""

    references: Literal["stored", "drawn"] = "stored"
    """References in training: as stored, or newly drawn for each row of a batch from other samples
    with the same speaker in their JSON: one to three joined, cropped to a random length"""

    speaker_patch_size: PositiveInt = 4
    """Frames in one speaker patch of the model; references are padded to a multiple of it"""

    max_text_tokens: Annotated[PositiveInt, INPUT] = 192
    """Longest text, in tokens"""

    verbatim_fraction: Annotated[Fraction, TRAINING] = 0.0
    """Fraction of draws in which a sample with "text_verbatim" in its JSON is trained with that instead of "text";
    1: all of them. Held-out loss and speech samples have "text" """

    batching: Annotated[Literal["buckets", "packed"], WORKLOAD] = "buckets"
    """Micro-batches of samples of similar length, each padded to its bucket's (buckets), or rows of a fixed
    number of frames in which whole samples stand one behind the other (packed)"""

    longest_per_row: Annotated[int, Bounds(1, 1024), WORKLOAD] = 4
    """Utterances of the longest length that fit in a row of packed batches; a micro-batch is a multiple
    of them. More give fuller rows"""

    num_buckets: Annotated[int, Bounds(1, MAX_BUCKETS), WORKLOAD] = 8
    """Maximum number of length buckets (= compiled shapes), at most 8"""

    bucket_frames: Annotated[list[int], WORKLOAD] = field(default_factory=list)
    """Upper lengths of the buckets in frames; empty: chosen from the data's lengths"""

    bucket_batch_sizes: Annotated[list[int], WORKLOAD] = field(default_factory=list)
    """Samples of a global batch of each bucket in bucket_frames, each divisible by ranks x accumulation
    steps, the last as global_batch_size; empty: as many frames as in the longest bucket's"""

    batch_multiple: PositiveInt = 8
    """Every global batch is a multiple of this many samples; it must be divisible by ranks x
    accumulation steps"""

    on_too_long: Literal["crop", "drop", "error"] = "drop"
    """Samples over the limits are cropped to their first max_frames frames (too long a text is still
    dropped), dropped, or an error; the first two are counted"""

    max_dropped_fraction: Fraction = 0.1
    """Fraction of the samples that may be dropped for max_frames and max_text_tokens; more is an error"""

    num_workers: Annotated[int, Bounds(0, 10**6), WORKLOAD] = 2
    """Loader threads; 0: the training thread fills batches"""

    prefetch_batches: Annotated[int, Bounds(0, 10**6)] = 4
    """Micro-batches to prefetch"""

    conditioning: list[str] = field(default_factory=list)
    """Tokens put before the text, in this order, from the samples' JSON: any of speaker, language,
    quality, class and duration"""

    conditioning_dropout: Fraction = 0.1
    """Fraction of samples in which a conditioning token is replaced by "unknown", drawn per token"""

    duration_token_seconds: PositiveFloat = 0.5
    """Width of one duration token's range, in seconds"""

    audit: bool = False
    """Each data-parallel rank writes the ids it trained on, step by step, to the run's audit/ folder"""


@dataclass
class Encoder:
    model: Annotated[str, WORKLOAD] = "bytes"
    """Text encoder: "bytes", "chars", "phones:en-us" or "subwords:NAME" is the learned one inside the model, over utf-8 bytes, the
    characters of the data, the phones that espeak-ng gives the text in that language, or the pieces of a pretrained tokenizer; anything else is a pretrained one, a local folder or a name of the Hugging
    Face hub such as "google/t5gemma-2-270m-270m" or "google-t5/t5-base". An existing local path takes precedence"""

    added_tokens: list[str] = field(default_factory=list)
    """Parts of the texts that are one token each, such as "[S1]" before a speaker's turn or "(laugh)"; they
    have no letters in lengths and word errors"""

    convention: Annotated[Literal["", "echo", "irodori"], WORKLOAD] = ""
    """Project whose rules the texts follow, for a model that titan-tts convert made: Echo-TTS's punctuation, [S1]
    before the text and no end token (echo), or Irodori-TTS's punctuation (irodori)"""

    frozen: Annotated[bool, TRAINING, WORKLOAD] = True
    """A pretrained encoder is not trained and not in the checkpoint; false trains it with the model, at
    [optimizer] encoder_lr"""

    dtype: Annotated[Literal["bfloat16", "float32"], WORKLOAD] = "bfloat16"
    """Precision of a frozen encoder; a trained one has the model's"""

    fsdp_min_gib: NonNegativeFloat = 4.0
    """Size of a frozen encoder's weights, in GiB, above which it is sharded over the ranks (FSDP2)"""

    vocab_size: NonNegativeInt = 0
    """Number of ids of the tokenizer; 0: taken from the tokenizer built from the data"""

    dim: NonNegativeInt = 0
    """Width of the text features; 0: the flavor's text_dim for the learned encoder, the config's width
    for a pretrained one"""

    n_layers: PositiveInt = 2
    """Blocks of the learned encoder"""

    n_heads: PositiveInt = 4
    """Heads of the learned encoder"""


@dataclass
class Attention:
    backend: Literal["auto", "sdpa", "matmul", "varlen", "flex"] = "auto"
    """Kernel of the decoder's attention: PyTorch's with a mask over the keys (sdpa), flash attention
    over packed keys (varlen), flex attention over blocks of keys (flex), or the fastest known for the
    device (auto)"""


@dataclass
class Objective:
    prediction: Annotated[Literal["velocity", "noise"], WEIGHTS] = "velocity"
    """Prediction target of the network: ε - x0 or ε"""

    time_distribution: Literal["logit_normal", "uniform"] = "logit_normal"
    """Distribution of the diffusion time, stratified over the global batch"""

    logit_mean: float = 0.0
    """Mean of the logit-normal's normal; higher means more noise"""

    logit_std: PositiveFloat = 1.0
    """Standard deviation of the logit-normal's normal"""

    text_dropout: Fraction = 0.1
    """Fraction of samples whose text keys are hidden"""

    speaker_dropout: Fraction = 0.1
    """Fraction of samples whose speaker keys are hidden"""

    loss_on_padding: bool = False
    """Includes the padding after the end (zero latents) in the loss, so that the model learns where to stop; the
    padded frames are then visible to it"""


@dataclass
class Distill:
    teacher: str = ""
    """Model that speaks in many steps, a folder that titan-tts export wrote: the run starts from its weights and learns
    to speak as it does in [sampling] steps without guidance. Empty: no distillation"""

    teacher_steps: Annotated[PositiveInt, TRAINING, WORKLOAD] = 4
    """Euler steps of the teacher in each interval of the student's schedule"""

    passes: Annotated[NonNegativeInt, WORKLOAD] = 0
    """Passes of a sample through the teacher in a step; 0: follows from its guidance"""

    times: Annotated[list[float], TRAINING] = field(default_factory=list)
    """Begins of the student's intervals; empty: follow from [sampling] steps, schedule and sway"""

    fingerprint: Annotated[str, TRAINING] = ""
    """Of the teacher's weights and config; empty: taken from its folder"""


@dataclass
class EMA:
    enable: Annotated[bool, WORKLOAD] = True
    """Exponential moving averages of the weights, sharded like them and checkpointed"""

    decays: Annotated[list[float], WORKLOAD] = field(default_factory=lambda: [0.9999])
    """Decay per step of each average; after n earlier updates it is min(decay, n / (9 + n)).
    [validation] tells which is best; each takes 4 bytes per parameter"""


@dataclass
class Sampling:
    steps: PositiveInt = 40
    """Evaluations of the velocity from noise to speech: each is a pass through the network, and one more
    per branch of guidance. euler takes one per interval of the schedule, midpoint and heun take two"""

    solver: Literal["euler", "midpoint", "heun"] = "euler"
    """ODE solver: euler is of first order, midpoint and heun of second"""

    schedule: Literal["linear", "sway", "epss"] = "linear"
    """Times of the intervals: even (linear); denser at the noise, as in F5-TTS (sway); or 5 to 16 of 32 swayed
    ones"""

    start_t: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0
    """Time at which sampling starts, a factor of the schedule's times; Echo-TTS takes 0.999"""

    sway: Annotated[float, Bounds(-1, MAX_SWAY)] = -1.0
    """Coefficient of sway and epss, from -1 (denser near the noise) to 1.75 (near the data)"""

    text_scale: float = 3.0
    """Guidance towards the text"""

    speaker_scale: float = 0.0
    """Guidance towards the speaker"""

    guidance: Literal["independent", "joint", "alternating"] = "independent"
    """Guides away from a branch without text and one without speaker (independent); from one without both (joint); or
    from each in turn, interval by interval (alternating)"""

    min_t: Fraction = 0.5
    """Guidance is applied in intervals that begin in (min_t, max_t]"""

    max_t: Fraction = 1.0
    """Upper end of the times of guidance"""

    cfg_zero_star: bool = False
    """Scales the branches of guidance towards the velocity with all conditions (CFG-Zero*)"""

    zero_init_steps: NonNegativeInt = 0
    """Number of first intervals to skip, with their evaluations (zero-init of CFG-Zero*)"""

    truncation_factor: PositiveFloat = 1.0
    """Factor of the noise that sampling starts from; below 1 gives more average speech"""

    rescale_k: PositiveFloat = 1.0
    """Temporal score rescaling: speech of a variance k times as small; 1: off"""

    rescale_sigma: PositiveFloat = 1.0
    """Standard deviation of the latents that rescale_k assumes; a larger one acts earlier"""

    speaker_kv_scale: PositiveFloat = 1.0
    """Factor of the speaker's keys and values: above 1 keeps closer to the voice; 1: off"""

    speaker_kv_min_t: Fraction = 0.0
    """Applies speaker_kv_scale in intervals that begin in (speaker_kv_min_t, 1]"""

    codec: str = "mel_dct"
    """Codec that turns latents into a waveform: mel_dct, the path of DAC-VAE weights (weights.pth,
    .safetensors or the folder of one), or a hub name such as facebook/dacvae-watermarked"""


@dataclass
class Validation:
    enable: bool = True
    """Measures the loss of held-out samples during training, if there are any"""

    path: str | list[str] = ""
    """Shards of held-out samples, as [data] path; empty: the folder heldout next to a [data] path of one
    folder, as titan-tts prepare makes it"""

    freq: PositiveInt = 500
    """Steps from one validation to the next; the last step is one too"""

    samples: PositiveInt = 64
    """Held-out samples, spread evenly over the shards, and as many training samples for comparison"""

    times: list[float] = field(default_factory=lambda: [0.99, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2])
    """Diffusion times at which the loss is measured"""

    batch_size: PositiveInt = 16
    """Samples in one forward pass of a rank"""

    seed: NonNegativeInt = 0
    """Seed of the noise, which is the same in every validation"""

    keep_best: str = "best_heldout_loss"
    """Metric of validation.jsonl whose best checkpoint is kept, such as best_heldout_loss (of all
    averages), heldout_loss_at_0.9, text_gain or wer; empty: none"""


@dataclass
class Samples:
    freq: NonNegativeInt = 0
    """Steps from one set of speech samples to the next, and after the last step; 0: none"""

    count: PositiveInt = 8
    """Prompts to synthesize: held-out texts of as many speakers as there are"""

    raw: bool = False
    """Also synthesizes with the raw weights, not only with their average"""

    seed: NonNegativeInt = 0
    """Seed of the noise, which is the same in every set"""

    recognizer: str = ""
    """Speech recognizer that transcribes the samples: whisper:large-v3 (or a folder), faster-whisper:large-v3,
    words:zero,one,... (offline, for texts of these words only), package.module:factory; empty: nothing"""

    speaker_scorer: str = ""
    """Scorer that compares a sample's voice with its reference: resemblyzer, xvector:microsoft/wavlm-base-plus-sv (or
    a folder), own (the model's own speaker encoder, which is not independent), package.module:factory; empty: nothing"""

    opinion: str = ""
    """Predictor of listeners' opinion: dnsmos, package.module:factory; empty: nothing"""


@dataclass
class Resume:
    allow: list[str] = field(default_factory=list)
    """Changes of the config to accept when a run is resumed, such as optimizer.lr. A checkpoint records
    what it was trained with, and any other change is refused."""


@dataclass
class Divergence:
    spike_sigmas: NonNegativeFloat = 10.0
    """Skips a step whose log loss or log gradient norm is this many standard deviations above the last
    steps', or is not finite; 0: only if it is not finite"""

    max_bad_steps: Annotated[int, Bounds(0, BAD_STEPS_WINDOW, open_high=True)] = 3
    """After more bad steps than this within 32 steps the run returns to its last checkpoint and
    skips the batches since"""

    max_rollbacks: NonNegativeInt = 2
    """Number of rollbacks to one checkpoint before the run ends"""


@dataclass
class Lora:
    rank: Annotated[NonNegativeInt, TRAINING, WORKLOAD] = 0
    """Rank of low-rank updates (LoRA) of the decoder's projections, which a run trains over the weights of
    [checkpoint] initial_load_path, and which its checkpoints hold alone; 0: all weights are trained"""

    alpha: Annotated[PositiveFloat, TRAINING] = 16.0
    """Updates are multiplied by alpha / rank"""


@dataclass
class Benchmark:
    enable: bool = False
    """Times training steps on synthetic data, without checkpoints, and writes benchmark.json to the
    run's folder; [data] path is not read"""

    duration_seconds: NonNegativeFloat = 0.0
    """Seconds of timed steps; 0: steps decides"""

    steps: NonNegativeInt = 0
    """Timed steps, or their maximum where duration_seconds is given too; 0: duration_seconds decides"""

    warmup_steps: PositiveInt = 3
    """Steps in each bucket's shape before timing starts, for compiling and for the recording of CUDA
    graphs, which needs at least 3"""

    profile: bool = True
    """On several ranks profiles two more steps after the timed ones, for the time of collectives"""

    lengths: Literal["mixed", "longest"] = "mixed"
    """Utterances of log-normal lengths in the buckets of such data (mixed), or all of
    [data] max_frames, max_text_tokens and max_speaker_frames (longest)"""

    mean_seconds: Annotated[PositiveFloat, INPUT] = 9.0
    """Mean of the log-normal lengths, in seconds; truncated to 1 s and [data] max_frames"""

    sigma: PositiveFloat = 0.5
    """Standard deviation of the logarithm of these lengths"""


@dataclass
class JobConfig(titan.JobConfig):
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    compile: Compile = field(default_factory=Compile)
    parallelism: Parallelism = field(default_factory=Parallelism)
    megatron: Megatron = field(default_factory=Megatron)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    encoder: Encoder = field(default_factory=Encoder)
    lora: Lora = field(default_factory=Lora)
    attention: Attention = field(default_factory=Attention)
    objective: Objective = field(default_factory=Objective)
    distill: Distill = field(default_factory=Distill)
    ema: EMA = field(default_factory=EMA)
    sampling: Sampling = field(default_factory=Sampling)
    validation: Validation = field(default_factory=Validation)  # type: ignore[assignment]
    samples: Samples = field(default_factory=Samples)
    resume: Resume = field(default_factory=Resume)
    divergence: Divergence = field(default_factory=Divergence)
    benchmark: Benchmark = field(default_factory=Benchmark)
