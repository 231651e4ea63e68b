"""A config's model before its data are read: its sizes, its parameters one by one, and what it downloads.

The model is built on the meta device: nothing is allocated, fetched or read.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Shard

from torchtitan.models.dit_tts import get_train_spec, model_flavors
from torchtitan.models.dit_tts.config.job_config import PHONES, JobConfig, is_pretrained
from torchtitan.models.dit_tts.infra.adapters import add_adapter, is_trained
from torchtitan.models.dit_tts.infra.matmul_weights import matmul_weights, weight_of
from torchtitan.models.dit_tts.infra.parallelize_megatron import split_parameters
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.speech.codec.dac_vae_weights import HUB_NAME, SUFFIXES
from torchtitan.models.dit_tts.speech.codec.interface import OWN, WITHOUT_WEIGHTS, codec_kind
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, blocks_of, find_source
from torchtitan.models.dit_tts.text.hf_files import weight_files
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.vocabulary import (
    SUBWORDS,
    Vocabulary,
    make_vocabulary,
    unit_of,
)

_CODEC_FILE = "weights.pth"
ROOT, HEAD = "root", "head"
"""Units of FSDP2: what no other unit has, and the last norm with the output"""


@dataclass(frozen=True)
class Weight:
    """One parameter of the model."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    split: int | None
    """dimension that tensor parallelism divides"""

    product: bool
    """a large matrix of a decoder block, which Muon updates"""

    unit: str
    """modules whose weights FSDP2 gathers together, before `fsdp_blocks_per_unit` joins blocks: layers.3"""

    def local_numel(self, shards: int, tensor: int) -> int:
        """Numbers of the first rank, which has the longest shard: FSDP2 divides the first dimension and rounds up."""
        shape = list(self.shape) or [1]
        if self.split is not None:
            shape[self.split] //= tensor
        shape[0] = -(-shape[0] // shards)
        return prod(shape)


@dataclass(frozen=True)
class Model:
    """A config's model."""

    args: DiTTTSModelArgs
    source: HFEncoderSpec | None
    """of a pretrained text encoder, inside or outside the model"""

    encoder_parameters: int
    """of a frozen text encoder outside the model"""

    weights: tuple[Weight, ...]
    unknown: tuple[str, ...]
    """sentences about what depends on the data"""

    @property
    def trained(self) -> int:
        return self._total(trained=True)

    @property
    def frozen(self) -> int:
        """With a text encoder outside the model and a teacher, which is as large as the student."""
        teacher = self.trained if self.args.teacher_passes else 0
        return self._total(trained=False) + self.encoder_parameters + teacher

    def _total(self, trained: bool) -> int:
        return sum(prod(each.shape) for each in self.weights if each.trained == trained)

    def parts(self) -> Counter[str]:
        """Parameters of each module of the model, and of the adapter."""
        found: Counter[str] = Counter()
        for each in self.weights:
            part = "adapter" if is_trained(each.name) else each.name.partition(".")[0]
            found[part] += prod(each.shape)
        return found


def describe_model(config: JobConfig) -> Model:
    """The model that training would build, as far as it is known without data or network. `config`: its
    dump_folder is the run's own folder, as upstream sees it."""
    encoder = config.encoder
    source = None
    if is_pretrained(encoder.model):
        source = find_source(encoder.model, download=False, folder=Path(config.job.dump_folder))
    n_ids, unknown = _known_ids(config, source)
    args = model_flavors()[config.model.flavor]
    known = replace(config, encoder=replace(encoder, vocab_size=n_ids))
    args.update_from_config(known, download=False)
    with torch.device("meta"):
        model = get_train_spec().model_cls(args)
    add_adapter(model, config.lora)
    outside = source.num_parameters() if source is not None and encoder.frozen else 0
    return Model(args, source, outside, tuple(_weights(model)), unknown)


def _weights(model: nn.Module) -> Iterable[Weight]:
    splits = split_parameters(model)
    products = set(map(weight_of, matmul_weights(model)))
    for name, parameter in model.named_parameters():
        placement = splits.get(parameter)
        split = placement.dim if isinstance(placement, Shard) else None
        shape, unit = tuple(parameter.shape), _unit(model, name)
        yield Weight(name, shape, parameter.requires_grad, split, parameter in products, unit)


def _unit(model: nn.Module, name: str) -> str:
    """As `infra.parallelize` groups modules."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    if first == "text_encoder" and isinstance(model.text_encoder, PretrainedTextEncoder):
        for number, block in enumerate(blocks_of(model.text_encoder.core)):
            if any(model.get_parameter(name) is each for each in block.parameters()):
                return f"text_encoder.{number}"
    if first in ("text_encoder", "speaker_encoder"):
        return first
    return HEAD if first in ("norm", "output") else ROOT


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


def downloads(config: JobConfig, source: HFEncoderSpec | None) -> list[str]:
    """A line on each pretrained part that a config names: whether it is on this machine, or the command that fetches
    it. These are the text encoder, if `source` is one, and the codec of [sampling] codec."""
    found = []
    if source is not None:
        name, here = source.model, bool(weight_files(source.model))
        if not os.path.isdir(name):
            here = here and not source.built_in and _cached(name, "tokenizer.json")
        found.append((name, "text encoder", here, "" if os.path.isdir(name) else name))
    name = config.sampling.codec
    if codec_kind(name) not in (*WITHOUT_WEIGHTS, OWN):
        path, purpose = Path(name).expanduser(), "codec, for preparation and generation"
        # As the codec takes a name: what exists or ends like a file of weights is a path.
        if path.exists() or path.suffix in SUFFIXES or not HUB_NAME.fullmatch(name):
            found.append((name, purpose, path.exists(), ""))
        else:
            found.append((name, purpose, _cached(name, _CODEC_FILE), f"{name} {_CODEC_FILE}"))
    return [
        f"{name} ({purpose}): {'on this machine' if here else 'MISSING'}"
        + (f"; fetch it with: hf download {what}" if what and not here else "")
        for name, purpose, here, what in found
    ]


def _cached(name: str, file: str) -> bool:
    """Returns whether the Hugging Face cache has a file; False also without the hub's library."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(name, file), str)
