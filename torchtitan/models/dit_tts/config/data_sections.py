"""Sections of the samples: their shards, order, batches, and texts."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.models.dit_tts.config.marks import (
    EXPORTED,
    INPUT,
    RECIPE,
    TRAINING,
    WORKLOAD,
    Bounds,
    Fraction,
    Frames,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

MAX_BUCKETS = 8
"""Every bucket is a compiled shape"""


@dataclass
class Data:
    path: Annotated[str | list[str], INPUT] = ""
    """The shards: a folder of .tar files, one of them, a glob, a pattern with {000000..000099}, or a
    URL (s3://, http://, https:// ...) of one of these; or a list of them, one dataset each"""

    allow_heldout: bool = False
    """Allows path to name held-out shards, such as prepare's folder heldout, for training"""

    weights: Annotated[list[float], Bounds(1e-6, 1e6)] = field(default_factory=list)
    """Sampling weight of each dataset in path, on any scale, from 1e-6 to 1e6; empty: every sample once per epoch"""

    balance_by: Literal["", "speaker", "language", "quality", "class"] = ""
    """Key of the samples' JSON whose values are balanced within each dataset; empty: none"""

    balance_beta: Annotated[float, Bounds(0, 1, open_high=True)] = 0.999
    """Parameter β of the effective number (1 - β^n) / (1 - β) of a class of n samples: 0 keeps the
    classes as they are, values near 1 make them equally frequent"""

    use_sample_weights: bool = False
    """Draws samples in proportion to the "weight" in their JSON, from 1e-6 to 1e6, too; those without count 1"""

    duration_alpha: Annotated[float, Bounds(-10, 10)] = 0.0
    """Power α: samples are drawn in proportion to duration^α; 0: uniformly"""

    epochs: Annotated[int, Bounds(0, 10**6)] = 0
    """Passes over the data; sets [training] steps. 0: steps decides"""

    on_error: Literal["raise", "skip"] = "raise"
    """On a corrupt sample the run ends (raise), or another sample replaces it and it is counted
    (skip)"""

    max_corrupt_fraction: Fraction = 0.01
    """With on_error = "skip", fraction of corrupt samples above which the run ends"""

    seed: NonNegativeInt = 0
    """Seed of the order, the parts of long references, the noise, the times and the condition dropout"""

    latent_channels: Annotated[PositiveInt, EXPORTED] = 128
    """Width of a latent frame in the shards"""

    frames_per_second: Annotated[PositiveFloat, EXPORTED] = 25.0
    """Latent frames per second of audio"""

    max_frames: Annotated[Frames, INPUT, EXPORTED] = 768
    """Longest utterance, in latent frames; longer ones are left out, and counted"""

    max_speaker_frames: Annotated[Frames, INPUT, EXPORTED] = 384
    """Longest speaker reference, in latent frames; longer ones are cropped, in training to another part
    at each draw"""

    max_reference_ratio: Annotated[float, Bounds(0, 10**6), INPUT] = 1.0
    """Longest reference of a bucket over its longest utterance (packed: of a sample over its own); longer
    ones are cropped, too. The longest bucket keeps whole references; 0: every bucket does. 1.0 mostly
    removes padding"""

    references: Literal["stored", "drawn"] = "stored"
    """References in training: as stored, or newly drawn for each row of a batch from other samples
    with the same speaker in their JSON: one to three joined, cropped to a random length"""

    speaker_patch_size: Annotated[PositiveInt, EXPORTED] = 4
    """Frames in one speaker patch of the model; references are padded to a multiple of it"""

    max_text_tokens: Annotated[PositiveInt, INPUT, EXPORTED] = 192
    """Longest text, in tokens"""

    max_caption_tokens: Annotated[int, Bounds(0, 4096), TRAINING, INPUT, EXPORTED] = 0
    """Longest caption ("caption" in a sample's JSON: the voice and its manner in words), in bytes of UTF-8 (of
    Irodori-TTS's models in pieces); longer ones are cut. 0: the model takes no captions"""

    verbatim_fraction: Annotated[Fraction, TRAINING] = 0.0
    """Fraction of draws in which a sample with "text_verbatim" in its JSON is trained with that instead of "text";
    1: all of them. Held-out loss and speech samples have "text" """

    batching: Annotated[Literal["buckets", "packed"], WORKLOAD, RECIPE] = "buckets"
    """Micro-batches of samples of similar length, each padded to its bucket's (buckets), or rows of a fixed
    number of frames in which whole samples stand one behind the other (packed)"""

    longest_per_row: Annotated[int, Bounds(1, 1024), WORKLOAD, RECIPE] = 4
    """Utterances of the longest length that fit in a row of packed batches; a micro-batch is a multiple
    of them. More give fuller rows"""

    num_buckets: Annotated[int, Bounds(1, MAX_BUCKETS), WORKLOAD, RECIPE] = 8
    """Maximum number of length buckets (= compiled shapes), at most 8"""

    bucket_frames: Annotated[list[int], WORKLOAD] = field(default_factory=list)
    """Upper lengths of the buckets in frames; empty: chosen from the data's lengths"""

    batch_multiple: Annotated[PositiveInt, RECIPE] = 8
    """Every global batch is a multiple of this many samples; it must be divisible by ranks x
    accumulation steps"""

    max_dropped_fraction: Fraction = 0.1
    """Fraction of the samples that may be dropped for max_frames and max_text_tokens; more is an error"""

    num_workers: Annotated[int, Bounds(0, 10**6), WORKLOAD] = 2
    """Loader threads; 0: the training thread fills batches"""

    prefetch_batches: Annotated[int, Bounds(1, 10**6)] = 4
    """Micro-batches to prefetch"""

    conditioning: Annotated[list[str], EXPORTED] = field(default_factory=list)
    """Tokens put before the text, in this order, from the samples' JSON: any of speaker, language,
    quality, class and duration"""

    conditioning_dropout: Annotated[Fraction, EXPORTED] = 0.1
    """Fraction of samples in which a conditioning token is replaced by "unknown", drawn per token"""

    duration_token_seconds: Annotated[PositiveFloat, EXPORTED] = 0.5
    """Width of one duration token's range, in seconds"""

    audit: bool = False
    """Each data-parallel rank writes the ids it trained on, step by step, to the run's audit/ folder"""


@dataclass
class Encoder:
    model: Annotated[str, WORKLOAD, EXPORTED] = "bytes"
    """Text encoder: "bytes", "chars", "phones:en-us" or "subwords:NAME" is the learned one inside the model, over utf-8 bytes, the
    characters of the data, the phones that espeak-ng gives the text in that language, or the pieces of a pretrained tokenizer; anything else is a pretrained one, a local folder or a name of the Hugging
    Face hub such as "google/t5gemma-2-270m-270m" or "google-t5/t5-base". An existing local path takes precedence"""

    added_tokens: Annotated[list[str], EXPORTED] = field(default_factory=list)
    """Parts of the texts that are one token each, such as "[S1]" before a speaker's turn or "(laugh)"; they
    have no letters in lengths and word errors"""

    convention: Annotated[Literal["", "echo", "irodori"], WORKLOAD, EXPORTED] = ""
    """Project whose rules the texts follow, for a model that titan-tts convert made: Echo-TTS's punctuation, [S1]
    before the text and no end token (echo), or Irodori-TTS's punctuation (irodori)"""

    normalize: Annotated[Literal["", "en", "zh", "ja"], WORKLOAD, EXPORTED] = ""
    """Language in which wetext says numbers, dates, units, currency and abbreviations as words, before letters or
    phones; the data keeps what people wrote. Empty: off"""

    frozen: Annotated[bool, TRAINING, WORKLOAD, EXPORTED] = True
    """A pretrained encoder is not trained and not in the checkpoint; false trains it with the model, at
    [optimizer] encoder_lr"""

    dtype: Annotated[Literal["bfloat16", "float32"], WORKLOAD, EXPORTED] = "bfloat16"
    """Precision of a frozen encoder; a trained one has the model's"""

    dim: Annotated[NonNegativeInt, EXPORTED] = 0
    """Width of the text features; 0: the flavor's text_dim for the learned encoder, the config's width
    for a pretrained one"""

    n_layers: Annotated[PositiveInt, EXPORTED] = 2
    """Blocks of the learned encoder"""

    n_heads: Annotated[PositiveInt, EXPORTED] = 4
    """Heads of the learned encoder"""

    vocab_size: Annotated[NonNegativeInt, EXPORTED] = 0
    """Number of ids of the tokenizer; 0: taken from the tokenizer built from the data"""
