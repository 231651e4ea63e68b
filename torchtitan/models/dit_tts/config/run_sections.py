"""Sections of what a run trains, measures and speaks with."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.models.dit_tts.config.marks import (
    FRACTION,
    INPUT,
    RECIPE,
    TRAINING,
    WEIGHTS,
    WORKLOAD,
    Bounds,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

BAD_STEPS_WINDOW = 32
"""Steps among which `[divergence] max_bad_steps` counts"""


@dataclass
class Lora:
    rank: Annotated[NonNegativeInt, TRAINING, WORKLOAD] = 0
    """Rank of low-rank updates (LoRA) of the decoder's projections, which a run trains over the weights of
    [checkpoint] initial_load_path, and which its checkpoints hold alone; 0: all weights are trained"""

    alpha: Annotated[PositiveFloat, TRAINING] = 16.0
    """Updates are multiplied by alpha / rank"""


@dataclass
class Attention:
    backend: Literal["auto", "sdpa", "matmul", "varlen"] = "auto"
    """Kernel of the decoder's attention: PyTorch's with a mask over the keys (sdpa), flash attention
    over packed keys (varlen), or the fastest known for the device (auto)"""


@dataclass
class Kernels:
    modulated_norm: Literal["definition", "triton"] = "definition"
    """The decoder's blocks add an update, norm, scale and shift: as the compiler or PyTorch computes the definition, or by
    one Triton kernel and one for its gradients (triton), which has not been measured on a GPU"""


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

    caption_dropout: Fraction = 0.1
    """Fraction of samples whose caption is hidden"""

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
    """Start times of the student's intervals; empty: computed from [sampling] steps, schedule and sway"""

    fingerprint: Annotated[str, TRAINING] = ""
    """Fingerprint of the teacher's weights and config; empty: taken from its folder"""


@dataclass
class EMA:
    enable: Annotated[bool, WORKLOAD] = True
    """Exponential moving averages of the weights, sharded like them and checkpointed"""

    decays: Annotated[list[float], FRACTION, WORKLOAD] = field(default_factory=lambda: [0.9999])
    """Decay per step of each average; after n earlier updates it is min(decay, n / (9 + n)).
    [validation] tells which is best; each takes 4 bytes per parameter"""


@dataclass
class Sampling:
    steps: PositiveInt = 40
    """Evaluations of the velocity from noise to speech: each is a pass through the network, and one more
    per branch of guidance. euler takes one per interval of the schedule, midpoint and heun take two"""

    solver: Literal["euler", "midpoint", "heun"] = "euler"
    """ODE solver: euler is of first order, midpoint and heun of second"""

    schedule: Literal["linear", "sway"] = "linear"
    """Times of the intervals: even (linear), or denser at the noise, as in F5-TTS (sway)"""

    start_t: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0
    """Time at which sampling starts, a factor of the schedule's times; Echo-TTS takes 0.999"""

    sway: Annotated[float, Bounds(-1, 2 / (math.pi - 2))] = -1.0
    """Coefficient of sway, from -1 (denser near the noise) to 1.75 (near the data), above which times do not
    fall any more"""

    text_scale: float = 3.0
    """Guidance towards the text"""

    speaker_scale: float = 0.0
    """Guidance towards the speaker"""

    caption_scale: float = 0.0
    """Guidance towards the caption, of texts that have one"""

    guidance: Literal["independent", "joint", "alternating"] = "independent"
    """Guides away from branches without text, without speaker and without caption (independent); from one without all
    (joint); or from each in turn, interval by interval (alternating)"""

    min_t: Fraction = 0.5
    """Guidance is applied in intervals that begin in (min_t, max_t]"""

    max_t: Fraction = 1.0
    """Upper end of the times of guidance"""

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
    """Codec that turns latents into a waveform: mel_dct; mel_dct+vocoder and mel_dct+vocoder24k (the same latents); the path
    of DAC-VAE weights (weights.pth, .safetensors or their folder), or a hub name such as facebook/dacvae-watermarked"""


@dataclass
class Validation:
    enable: bool = True
    """Measures the loss of held-out samples during training, if there are any"""

    path: str | list[str] = ""
    """Shards of held-out samples, as [data] path; empty: the folder heldout next to a [data] path of one
    folder, as titan-tts prepare makes it"""

    freq: Annotated[PositiveInt, RECIPE] = 500
    """Steps from one validation to the next; the last step is one too"""

    samples: Annotated[PositiveInt, RECIPE] = 64
    """Held-out samples, spread evenly over the shards, and as many training samples for comparison"""

    times: Annotated[list[float], Bounds(0, 1, open_low=True), RECIPE] = field(
        default_factory=lambda: [0.99, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2]
    )
    """Diffusion times at which the loss is measured"""

    batch_size: Annotated[int, Bounds(2), RECIPE] = 16
    """Samples in one forward pass of a rank, at least 2: a gain is measured with the text of another sample"""

    seed: Annotated[NonNegativeInt, RECIPE] = 0
    """Seed of the noise, which is the same in every validation"""

    keep_best: Annotated[str, RECIPE] = "best_heldout_loss"
    """Metric of validation.jsonl whose best checkpoint is kept, such as best_heldout_loss (of all
    averages), heldout_loss_at_0.9, text_gain or wer; empty: none"""


@dataclass
class Samples:
    freq: NonNegativeInt = 0
    """Steps from one set of speech samples to the next, and after the last step; 0: none"""

    count: PositiveInt = 8
    """Prompts to synthesize: held-out texts of as many speakers as there are"""

    seed: NonNegativeInt = 0
    """Seed of the noise, which is the same in every set"""

    recognizer: str = ""
    """Speech recognizer that transcribes the samples: whisper-tiny.en or whisper-base (offline), whisper:large-v3 (or a folder),
    faster-whisper:large-v3, words:zero,one,... (offline, for texts of these words only), package.module:factory; empty:
    nothing"""

    speaker_scorer: str = ""
    """Speaker encoder that compares a sample's voice with its reference: resemblyzer,
    xvector:microsoft/wavlm-base-plus-sv (or a folder), package.module:factory; empty: nothing"""

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
class Benchmark:
    enable: bool = False
    """Times training steps on synthetic data, without checkpoints, and writes benchmark.json to the
    run's folder; [data] path is not read"""

    steps: NonNegativeInt = 0
    """Timed steps; a benchmark needs at least one"""

    warmup_steps: PositiveInt = 3
    """Steps in each bucket's shape before timing starts, for compiling and for the recording of CUDA
    graphs, which needs at least 3"""

    lengths: Literal["mixed", "longest"] = "mixed"
    """Utterances of log-normal lengths in the buckets of such data (mixed), or all of
    [data] max_frames, max_text_tokens and max_speaker_frames (longest)"""

    mean_seconds: Annotated[PositiveFloat, INPUT] = 9.0
    """Mean of the log-normal lengths, in seconds; truncated to 1 s and [data] max_frames"""

    sigma: PositiveFloat = 0.5
    """Standard deviation of the logarithm of these lengths"""
