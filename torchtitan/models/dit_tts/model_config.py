"""The model sizes: the flavors, and what a job config changes in them."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs, TextEncoderSizes
from torchtitan.models.dit_tts.model.flops import Lengths, training_flops
from torchtitan.models.dit_tts.text.conventions import IRODORI
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.vocabulary import BYTE_VOCAB_SIZE


@dataclass
class _PretrainedEncoder:
    """Builds a pretrained text encoder. Its fields are JSON, since upstream logs the model args so."""

    model: str
    folder: str
    download: bool

    def __call__(self) -> nn.Module:
        source = find_source(self.model, download=self.download, folder=Path(self.folder))
        return PretrainedTextEncoder(source)


_SIZES = (
    *("dim", "n_layers", "n_heads", "mlp_dim", "adaln_rank", "timestep_dim"),
    *("speaker_dim", "speaker_n_layers", "speaker_n_heads", "speaker_mlp_dim"),
    *("speaker_partial_patches", "speaker_bidirectional", "speaker_reference"),
    *("caption_n_layers", "text_mlp_dim", "text_projection", "rope_theta", "norm_eps"),
)
"""Fields of `DiTTTSModelArgs` that [model] sizes may change: no other key decides them"""

_WIDTHS = (
    *("dim", "mlp_dim", "adaln_rank", "timestep_dim"),
    *("speaker_dim", "speaker_mlp_dim"),
)
"""Fields in which a model differs from the one that [optimizer] base_dim names, as far as they are a flavor's"""

_MAX_SIZE = 2**20


def read_sizes(given: Sequence[str]) -> dict[str, int | float | bool]:
    """[model] sizes, each FIELD=VALUE in TOML, as fields of `DiTTTSModelArgs`."""
    kinds = {each.name: each.type for each in fields(DiTTTSModelArgs)}
    found: dict[str, int | float | bool] = {}
    for each in given:
        try:
            [(name, value)] = tomllib.loads(each).items()
        except ValueError:
            name, value = "", None
        require(
            name in _SIZES and name not in found,
            f"[model] sizes has {each!r}, but each must be FIELD=VALUE, with one of the fields {', '.join(_SIZES)}, "
            f"each once",
        )
        kind: Any = kinds[name]
        low = 0 if name == "text_mlp_dim" or kind is float else 1
        needed = f"a {kind.__name__} from {low} to {_MAX_SIZE}"
        fits = type(value) in (kind, int) and low <= value <= _MAX_SIZE
        if kind is bool:
            needed, fits = "true or false", type(value) is bool
        require(fits, f"[model] sizes has {each!r}, but {name} must be {needed}")
        found[name] = value
    return found


def write_sizes(args: DiTTTSModelArgs, flavor: str) -> list[str]:
    """[model] sizes of a model whose other sizes are the flavor's; the inverse of `read_sizes`."""
    had, found = _FLAVORS[flavor], list[str]()
    for name in _SIZES:
        value = getattr(args, name)
        if value != getattr(had, name):
            found.append(f"{name}={str(value).lower()}")
    return found


@dataclass
class DiTTTSModelConfig(DiTTTSModelArgs):
    """Model args with the two methods that upstream's trainer calls."""

    def update_from_config(  # type: ignore[override]  # upstream passes its own JobConfig
        self,
        job_config: JobConfig,
        *,
        folder: Path | None = None,
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        """Sets the sizes that the job config decides.

        Args:
            job_config: with the tokenizer's `vocab_size`.
            folder: the run folder, which keeps a copy of a pretrained encoder's config; None: the
                config's dump_folder, as in upstream's view.
            download: whether a pretrained text encoder's config may be downloaded.
        """
        for name, value in read_sizes(job_config.model.sizes).items():
            setattr(self, name, value)
        for width, heads in (("dim", "n_heads"), ("speaker_dim", "speaker_n_heads")):
            size, count = getattr(self, width), getattr(self, heads)
            require(
                size % (2 * count) == 0,
                f"[model] sizes make {heads} = {count} for {width} = {size}, but the width of a head must be an even "
                f"number; change one of them",
            )
        require(
            self.timestep_dim % 2 == 0,
            f"[model] sizes make timestep_dim = {self.timestep_dim}, but it must be an even number",
        )
        self.latent_channels = job_config.data.latent_channels
        self.speaker_patch_size = job_config.data.speaker_patch_size
        self.attention = job_config.attention.backend
        self.text_positions = job_config.model.text_positions
        self.max_caption_tokens = job_config.data.max_caption_tokens
        require(
            self.speaker_reference or self.max_caption_tokens > 0,
            "[model] sizes has speaker_reference=false with [data] max_caption_tokens = 0, but without references a model "
            "needs captions; set one of them",
        )
        self.lora_rank = job_config.lora.rank
        self.teacher_passes = job_config.distill.passes
        degree, flavor = job_config.parallelism.tensor_parallel_degree, job_config.model.flavor
        divided = math.gcd(self.n_heads, self.mlp_dim)
        require(
            divided % degree == 0,
            f"[parallelism] tensor_parallel_degree = {degree}, but it must divide {divided}, by the "
            f"{self.n_heads} heads and {self.mlp_dim} MLP units of [model] flavor = {flavor!r}",
        )
        encoder = job_config.encoder
        require(
            self.text_projection or not is_pretrained(encoder.model),
            f"[model] sizes has text_projection=false with [encoder] model = {encoder.model!r}, but only a learned "
            f"encoder can do without the projection; leave it out",
        )
        require(
            not self.speaker_bidirectional or job_config.data.batching != "packed",
            "[model] sizes has speaker_bidirectional=true with [data] batching = 'packed', in whose rows references "
            "have no place for their mean; set batching to 'buckets'",
        )
        if is_pretrained(encoder.model):
            self._take_pretrained(job_config, folder or Path(job_config.job.dump_folder), download)
        else:
            plain = encoder.model == "bytes" and not job_config.data.conditioning
            in_bytes = BYTE_VOCAB_SIZE + len(encoder.added_tokens)
            self.text_vocab_size = encoder.vocab_size or (in_bytes if plain else 0)
            require(
                self.text_vocab_size > 0,
                f"[encoder] vocab_size = 0 with model = {encoder.model!r} and [data] conditioning = "
                f"{job_config.data.conditioning}: the number of ids comes from the data; set it, or "
                f"give the config.toml of a run folder, which has it",
            )
            if encoder.convention == IRODORI:
                self.caption_vocab_size = self.text_vocab_size
            self.text_dim = encoder.dim or self.text_dim
            self.text_n_layers = encoder.n_layers
            self.text_n_heads = encoder.n_heads
            require(
                self.text_dim > 0 < encoder.n_heads and self.text_dim % (2 * encoder.n_heads) == 0,
                f"[encoder] n_heads = {encoder.n_heads} for a width of {self.text_dim}, but the width "
                f"of a head must be an even number; change n_heads or dim",
            )
        own_text = not is_pretrained(encoder.model) and not encoder.dim
        for each in _FLAVORS.values():
            if (each.task, each.dim) == (self.task, job_config.optimizer.base_dim):
                widths = *_WIDTHS, *(("text_dim",) * own_text)
                sizes = {name: getattr(each, name) for name in widths}
                self.tuned = replace(self, **sizes, text_encoder=None, tuned=None)

    def _take_pretrained(self, job_config: JobConfig, folder: Path, download: bool) -> None:
        """Sizes of a pretrained text encoder, from its own config."""
        encoder, checkpoint = job_config.encoder, job_config.checkpoint
        source = find_source(encoder.model, download=download, folder=folder)
        require(
            encoder.dim in (0, source.width),
            f"[encoder] dim = {encoder.dim}, but {encoder.model} is {source.width} wide by its config; "
            f"set dim = 0, which takes that",
        )
        self.text_vocab_size = 0
        self.text_dim = source.width
        self.text_encoder = (
            None if encoder.frozen else _PretrainedEncoder(encoder.model, str(folder), download)
        )
        resumes = any(folder.glob("*/step-*/.metadata"))
        self.text_encoder_starts = (
            not resumes or not checkpoint.enable or checkpoint.create_seed_checkpoint
        )
        self.text_encoder_sizes = TextEncoderSizes(
            *source.matmul_sizes(), trained=not encoder.frozen
        )
        self.first_condition_id = source.vocab_size
        self.condition_tokens = max(0, encoder.vocab_size - source.vocab_size)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and training FLOPs per frame at `seq_len` latent frames without conditions.

        The trainer's own figures come from `flops.py` with the true lengths.
        """
        n_params = sum(parameter.numel() for parameter in model.parameters())
        flops = training_flops(self, Lengths(frames=seq_len, text_tokens=0, speaker_frames=0))
        return n_params, flops // seq_len


def _flavor(decoder: Sequence[int], speaker: Sequence[int], **others: Any) -> DiTTTSModelConfig:
    names = "dim", "n_layers", "n_heads", "mlp_dim"
    sizes: dict[str, Any] = dict(zip(names, decoder, strict=True))
    sizes |= {f"speaker_{name}": size for name, size in zip(names, speaker, strict=True)}
    return DiTTTSModelConfig(**sizes, **others)


# Width, blocks, heads and hidden width of the decoder and of the speaker encoder. No two decoders of a task are as wide:
# [optimizer] base_dim names one. 60M and 300M: every width of the second is twice the first's, at heads of the same width.
_FLAVORS = {
    "debug": _flavor(
        (192, 4, 4, 528), (128, 2, 2, 352), text_dim=128, adaln_rank=32, timestep_dim=128
    ),
    "8M": _flavor(
        (256, 6, 4, 704), (160, 2, 2, 440), text_dim=160, adaln_rank=32, timestep_dim=256
    ),
    "18M": _flavor((320, 8, 5, 880), (192, 3, 3, 528), text_dim=192, adaln_rank=32),
    "60M": _flavor((512, 12, 8, 1408), (256, 4, 4, 704), text_dim=256, adaln_rank=64),
    "300M": _flavor((1024, 16, 16, 2816), (512, 6, 8, 1408), text_dim=512, adaln_rank=128),
    "800M": _flavor((1280, 24, 10, 3520), (768, 8, 6, 2112), text_dim=640),
    "3B": _flavor((2560, 32, 20, 7040), (1024, 8, 8, 2816), text_dim=1152),
    "8B": _flavor((4096, 32, 32, 11264), (1024, 8, 8, 2816), text_dim=2560),
    "duration": _flavor((128, 3, 2, 352), (128, 1, 2, 352), text_dim=128, task="duration"),
}


def model_flavors() -> dict[str, DiTTTSModelConfig]:
    """Fresh copies of the sizes: a job's config changes its own."""
    return {name: replace(args) for name, args in _FLAVORS.items()}
