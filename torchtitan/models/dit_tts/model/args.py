"""Sizes of the model. Shapes in this package: B batch, T latent frames, C latent channels,
L text tokens, S speaker frames (P after patching), D decoder width, H heads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.vocabulary import BYTE_VOCAB_SIZE, LEARNED_UNITS
from torchtitan.protocols.model import BaseModelArgs


@dataclass
class TextEncoderSizes:
    """What a pretrained text encoder costs to run."""

    matmul_parameters: int
    """weights of its matrix products"""

    n_layers: int
    """blocks"""

    attention_dim: int
    """heads times the width of a head"""

    trained: bool
    """whether it also goes backward"""


@dataclass
class DiTTTSModelArgs(BaseModelArgs):
    dim: int = 1280
    """Decoder width D"""

    n_layers: int = 24
    """Decoder blocks"""

    n_heads: int = 10
    """Decoder heads; the first half of them is rotated (RoPE)"""

    mlp_dim: int = 3520
    """Hidden width of the decoder's gated MLP"""

    speaker_dim: int = 768
    """Width of the speaker encoder, and of the text and speaker keys' input"""

    speaker_n_layers: int = 8
    """Blocks of the speaker encoder"""

    speaker_n_heads: int = 6
    """Heads of the speaker encoder, all rotated"""

    speaker_mlp_dim: int = 2112
    """Hidden width of the speaker encoder's gated MLP"""

    speaker_patch_size: int = 4
    """Speaker frames stacked into one key"""

    latent_channels: int = 128
    """Width C of a latent frame"""

    text_dim: int = 640
    """Width of the text features: the frozen encoder's hidden size, or the learned encoder's width"""

    text_vocab_size: int = 0
    """Ids of the learned text encoder inside the model; 0: there is none"""

    text_n_layers: int = 4
    """Blocks of the learned text encoder"""

    text_n_heads: int = 4
    """Heads of the learned text encoder, all rotated"""

    text_encoder: Callable[[], nn.Module] | None = None
    """Builds the pretrained text encoder inside the model, which is trained with it; None: there is
    none, and without a learned one the features come from outside"""

    text_encoder_starts: bool = True
    """Whether its weights start from the pretrained ones; false: a checkpoint of the run has them"""

    text_encoder_sizes: TextEncoderSizes | None = None
    """Of a pretrained text encoder that runs in training, inside the model or beside it"""

    condition_base: int = 0
    """First id of the conditioning tokens that a pretrained encoder does not know"""

    condition_ids: int = 0
    """Number of these; each has a row of its own among the text features"""

    adaln_rank: int = 256
    """Rank of the low-rank AdaLN"""

    timestep_dim: int = 512
    """Width of the sinusoidal timestep embedding"""

    rope_theta: float = 10000.0
    """Base of the rotary frequencies"""

    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm"""

    attention: str = "auto"
    """How the decoder's attention is computed, one of attention_backends.BACKENDS; no part of the
    model's mathematics"""

    def update_from_config(self, job_config: JobConfig, *, download: bool = True, **kwargs) -> None:
        """Takes over what the TOML says of the model.

        Args:
            job_config: its dump_folder is the run's own folder, if there is one yet.
            download: whether a pretrained text encoder's config may be asked for at the hub.

        Raises:
            InputError: a number of ids that is not known yet, or a size that cannot be built.
        """
        self.latent_channels = job_config.data.latent_channels
        self.speaker_patch_size = job_config.data.speaker_patch_size
        self.attention = job_config.attention.backend
        encoder = job_config.encoder
        if encoder.model in LEARNED_UNITS:
            plain = encoder.model == "bytes" and not job_config.data.conditioning
            self.text_vocab_size = encoder.vocab_size or (BYTE_VOCAB_SIZE if plain else 0)
            if not self.text_vocab_size:
                raise InputError(
                    f"[encoder] vocab_size = 0 with model = {encoder.model!r} and [data] conditioning "
                    f"= {job_config.data.conditioning}: the number of ids comes from the data; set "
                    f"it, or give the config.toml of a run's folder, which has it"
                )
            self.text_dim = encoder.dim or self.text_dim
            self.text_n_layers = encoder.n_layers
            self.text_n_heads = encoder.n_heads
        else:
            self._take_pretrained(job_config, download)
        self.check()

    def _take_pretrained(self, job_config: JobConfig, download: bool) -> None:
        """Sizes of a pretrained text encoder, from its own config."""
        # transformers is needed for such an encoder only.
        from torchtitan.models.dit_tts.text.hf_encoder import find_source
        from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder

        encoder, folder = job_config.encoder, job_config.job.dump_folder
        source = find_source(encoder.model, download=download, folder=Path(folder))
        if encoder.dim not in (0, source.width):
            raise InputError(
                f"[encoder] dim = {encoder.dim}, but {encoder.model} is {source.width} wide by its "
                f"config; set dim to 0, which takes that"
            )
        self.text_vocab_size = 0
        self.text_dim = source.width
        self.text_encoder = None if encoder.frozen else partial(PretrainedTextEncoder, source)
        resumes = any(Path(folder).glob("*/step-*/.metadata"))
        checkpoint = job_config.checkpoint
        self.text_encoder_starts = (
            not resumes or not checkpoint.enable or checkpoint.create_seed_checkpoint
        )
        self.text_encoder_sizes = None
        if not encoder.cache_features:
            self.text_encoder_sizes = TextEncoderSizes(
                *source.matmul_sizes(), trained=not encoder.frozen
            )
        self.condition_base = source.vocab_size
        self.condition_ids = max(0, encoder.vocab_size - source.vocab_size)

    def check(self) -> None:
        """Raises InputError where the sizes do not fit each other."""
        for name, width, heads in (
            ("model", self.dim, self.n_heads),
            ("speaker encoder", self.speaker_dim, self.speaker_n_heads),
            ("text encoder", self.text_dim, self.text_n_heads),
        ):
            if name == "text encoder" and not self.text_vocab_size:
                continue
            if heads < 1 or width < 1:
                raise InputError(
                    f"the {name} has width {width} and {heads} heads; both must be at least 1"
                )
            if width % heads or (width // heads) % 2:
                raise InputError(
                    f"the {name}'s width {width} with {heads} heads gives a head of "
                    f"{width / heads:g} channels; it must be a whole even number: change the width "
                    f"or the number of heads"
                )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and training FLOPs a frame at `seq_len` latent frames without conditions.

        Upstream's hook. The trainer's own figures come from `flops.py` with the true lengths.
        """
        from torchtitan.models.dit_tts.model.flops import Lengths, training_flops

        n_params = sum(p.numel() for p in model.parameters())
        flops = training_flops(self, Lengths(frames=seq_len, text_tokens=0, speaker_frames=0))
        return n_params, flops // seq_len
