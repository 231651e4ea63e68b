"""Sizes and exact parameter counts of the model that a config describes, and the pretrained parts that
it downloads. Nothing is fetched, and no data or weights are read."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.utils import set_default_dtype

from torchtitan.models.dit_tts import get_train_spec, model_flavors
from torchtitan.models.dit_tts.config.job_config import PHONES, Encoder, JobConfig, is_pretrained
from torchtitan.models.dit_tts.infra.adapters import is_trained
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.speech.codec.dac_vae_weights import HUB_NAME, SUFFIXES
from torchtitan.models.dit_tts.speech.codec.interface import OWN, WITHOUT_WEIGHTS, codec_kind
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, find_source
from torchtitan.models.dit_tts.text.hf_files import weight_files
from torchtitan.models.dit_tts.text.vocabulary import (
    SUBWORDS,
    Vocabulary,
    make_vocabulary,
    unit_of,
)

_CODEC_FILE = "weights.pth"


@dataclass(frozen=True)
class Part:
    """A row of the parameter table."""

    name: str
    parameters: int
    trained: bool
    note: str = ""


def total(parts: Iterable[Part], *, trained: bool) -> int:
    """Parameters of the trained or of the frozen parts."""
    return sum(part.parameters for part in parts if part.trained == trained)


@dataclass(frozen=True)
class ModelSizes:
    """A config's model before its data are read."""

    args: DiTTTSModelArgs
    source: HFEncoderSpec | None
    """of a pretrained text encoder, inside or outside the model"""

    unknown: tuple[str, ...]
    """sentences about what depends on the data"""


def model_sizes(config: JobConfig) -> ModelSizes:
    """The sizes that training would take, as far as they are known without data or network.
    `config`: its dump_folder is the run's own folder, as upstream sees it.
    """
    encoder = config.encoder
    source = None
    if is_pretrained(encoder.model):
        source = find_source(encoder.model, download=False, folder=Path(config.job.dump_folder))
    n_ids, unknown = _known_ids(config, source)
    args = model_flavors()[config.model.flavor]
    known = replace(config, encoder=replace(encoder, vocab_size=n_ids))
    args.update_from_config(known, download=False)
    # All fused backends of a GPU keep the same; what stands for them on a CPU keeps all scores.
    if args.attention != "matmul":
        args.attention = "sdpa"
    return ModelSizes(args, source, unknown)


def _known_ids(config: JobConfig, source: HFEncoderSpec | None) -> tuple[int, tuple[str, ...]]:
    """(token ids as far as they are known, sentences about the others)."""
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
    unit = unit_of(encoder.model)
    if source is None and unit in ("chars", PHONES, SUBWORDS):
        unknown.append(
            "the characters, phones or pieces of the texts: they depend on the data or a tokenizer; none is counted"
        )
    if labels:
        unknown.append(
            f"the values of {', '.join(labels)}: they depend on the data; of their conditioning tokens "
            f"only the one for an unknown value is counted"
        )
    if source is not None:
        added = Vocabulary("bytes", "", fields).size - Vocabulary("bytes").size
        return source.vocab_size + added, tuple(unknown)
    return Vocabulary(unit, "", fields).size, tuple(unknown)


def build_on_meta(args: DiTTTSModelArgs, dtype: str) -> nn.Module:
    """The plain model on the meta device; dtype as [training] dtype has it."""
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[dtype]):
        return get_train_spec().model_cls(args)


def count_parameters(
    model: nn.Module, encoder: Encoder, source: HFEncoderSpec | None
) -> list[Part]:
    """Exact counts by module; a frozen encoder outside the model is the first row."""
    parts: list[Part] = []
    if source is not None and encoder.frozen:
        where = "features from files, not in memory" if encoder.cache_features else encoder.dtype
        parts.append(
            Part(f"text encoder {source.model}", source.num_parameters(), False, f"frozen, {where}")
        )
    counts: dict[str, int] = {}
    blocks = len(list(model.get_submodule("layers").children()))
    for name, parameter in model.named_parameters():
        first = name.partition(".")[0]
        part = "adapter" if is_trained(name) else first
        counts[part] = counts.get(part, 0) + parameter.numel()
    adapted = "adapter" in counts
    notes = {"text_encoder": encoder.model, "layers": f"{blocks} of {counts['layers'] // blocks:,}"}
    for part, number in counts.items():
        parts.append(Part(part, number, part == "adapter" or not adapted, notes.get(part, "")))
    return parts


@dataclass(frozen=True)
class Download:
    """Pretrained weights that a config names, whether they are on this machine, and the command that fetches them
    (empty for a path)."""

    purpose: str
    name: str
    here: bool
    command: str = ""


def downloads(config: JobConfig, source: HFEncoderSpec | None) -> list[Download]:
    """The pretrained text encoder, if `source` is one, and the codec of [sampling] codec."""
    found = []
    if source is not None:
        name, here = source.model, bool(weight_files(source.model))
        folder = os.path.isdir(name)
        if not folder:
            here = here and not source.built_in and _cached(name, "tokenizer.json")
        found.append(Download("text encoder", name, here, "" if folder else f"hf download {name}"))
    name = config.sampling.codec
    if codec_kind(name) not in (*WITHOUT_WEIGHTS, OWN):
        path, purpose = Path(name).expanduser(), "codec, for preparation and generation"
        # As the codec takes a name: what exists or ends like a file of weights is a path.
        if path.exists() or path.suffix in SUFFIXES or not HUB_NAME.fullmatch(name):
            found.append(Download(purpose, name, path.exists()))
        else:
            here, command = _cached(name, _CODEC_FILE), f"hf download {name} {_CODEC_FILE}"
            found.append(Download(purpose, name, here, command))
    return found


def _cached(name: str, file: str) -> bool:
    """Whether the Hugging Face cache has a file; False also without the hub's library."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(name, file), str)
