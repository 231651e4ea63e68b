"""Sizes and exact parameter counts of the model that a config describes, without data or weights."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.dit_tts import get_train_spec
from torchtitan.models.dit_tts.config.job_config import Encoder, JobConfig, is_pretrained
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, find_source
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary, make_vocabulary
from torchtitan.tools.utils import set_default_dtype

# The parts of the model as people speak of them, by the first word of a parameter's name.
_PARTS = {
    "text_encoder": "text encoder",
    "condition_embedding": "conditioning tokens",
    "text_input": "text projection",
    "text_norm": "text projection",
    "speaker_encoder": "speaker encoder",
    "timestep": "timestep conditioning",
    "input": "latent input",
    "layers": "blocks",
    "norm": "output",
    "output": "output",
}


@dataclass(frozen=True)
class Part:
    """A row of the parameter table."""

    name: str
    parameters: int
    trained: bool
    note: str = ""


def trained_total(parts: Iterable[Part]) -> int:
    return sum(part.parameters for part in parts if part.trained)


def frozen_total(parts: Iterable[Part]) -> int:
    return sum(part.parameters for part in parts if not part.trained)


@dataclass(frozen=True)
class ModelSizes:
    """What is known of a config's model before its data are read."""

    args: DiTTTSModelArgs

    source: HFEncoderSpec | None
    """of a pretrained text encoder, inside the model or beside it"""

    unknown: tuple[str, ...]
    """sentences about what only the data tell"""


def model_sizes(config: JobConfig) -> ModelSizes:
    """The sizes that training would take, as far as they are known without data; no network is used.

    Args:
        config: its dump_folder is the run's own folder, as upstream sees it.

    Raises:
        InputError: an encoder whose sizes are not known here, or sizes that cannot be built.
    """
    encoder = config.encoder
    source = None
    if is_pretrained(encoder.model):
        source = find_source(encoder.model, download=False, folder=Path(config.job.dump_folder))
    n_ids, unknown = _known_ids(config, source)
    args = get_train_spec().model_args[config.model.flavor]
    known = replace(config, encoder=replace(encoder, vocab_size=n_ids))
    args.update_from_config(known, download=False)
    return ModelSizes(args, source, unknown)


def _known_ids(config: JobConfig, source: HFEncoderSpec | None) -> tuple[int, tuple[str, ...]]:
    """(ids of the tokenizer as far as they are known, what is not)."""
    encoder, data = config.encoder, config.data
    if encoder.vocab_size:
        return encoder.vocab_size, ()
    fields: dict[str, tuple[str, ...]] = {name: () for name in data.conditioning}
    if "duration" in fields:
        fields |= make_vocabulary(
            "bytes",
            conditioning=["duration"],
            duration_token_seconds=data.duration_token_seconds,
            max_seconds=data.max_frames / data.frames_per_second,
        ).conditioning
    labels = [name for name in data.conditioning if name != "duration"]
    unknown = []
    if encoder.model == "chars":
        unknown.append("the characters of the texts: only the data tell them, and none is counted")
    if labels:
        unknown.append(
            f"the values of {', '.join(labels)}: only the data tell them, and of the conditioning "
            f"tokens the unknown one alone is counted"
        )
    if source is not None:
        added = Vocabulary("bytes", "", fields).size - Vocabulary("bytes").size
        return source.vocab_size + added, tuple(unknown)
    return Vocabulary(encoder.model, "", fields).size, tuple(unknown)


def build_on_meta(args: DiTTTSModelArgs, dtype: str) -> nn.Module:
    """The plain model on the meta device; dtype as [training] dtype has it."""
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[dtype]):
        return get_train_spec().model_cls(args)


def count_parameters(
    model: nn.Module, encoder: Encoder, source: HFEncoderSpec | None
) -> list[Part]:
    """Exact counts by part; a frozen encoder beside the model is the first row."""
    parts = []
    if source is not None and encoder.frozen:
        where = "features from files, not in memory" if encoder.cache_features else encoder.dtype
        parts.append(
            Part(f"text encoder {source.model}", source.num_parameters(), False, f"frozen, {where}")
        )
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        first = name.partition(".")[0]
        part = _PARTS.get(first, first)
        counts[part] = counts.get(part, 0) + parameter.numel()
    for part, number in counts.items():
        name = f"{part} {encoder.model}" if part == "text encoder" else part
        note = f"{len(model.layers)} of {number // len(model.layers):,}" if part == "blocks" else ""
        parts.append(Part(name, number, True, note))
    return parts
