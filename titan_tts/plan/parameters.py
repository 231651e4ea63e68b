"""A config's model before its data are read: its sizes, and its parameters one by one.

The model is built on the meta device: nothing is allocated, fetched or read.
"""

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
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, blocks_of, find_source
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.vocabulary import SUBWORDS, Vocabulary, unit_of

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
    """modules whose weights FSDP2 gathers together: layers.3"""

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
    encoder_parameters: int
    """of a frozen text encoder outside the model"""

    weights: tuple[Weight, ...]
    unknown: str
    """what depends on the data and is not counted"""

    @property
    def trained(self) -> int:
        return sum(prod(each.shape) for each in self.weights if each.trained)

    @property
    def frozen(self) -> int:
        """Frozen parameters, with a text encoder outside the model and a teacher, which is as large as the student."""
        teacher = self.trained if self.args.teacher_passes else 0
        inside = sum(prod(each.shape) for each in self.weights if not each.trained)
        return inside + self.encoder_parameters + teacher

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
    return Model(args, outside, tuple(_weights(model)), unknown)


def _weights(model: nn.Module) -> Iterable[Weight]:
    splits = split_parameters(model)
    products = set(map(weight_of, matmul_weights(model)))
    blocks: dict[nn.Parameter, int] = {}  # of a pretrained text encoder
    if isinstance(model.text_encoder, PretrainedTextEncoder):
        for number, block in enumerate(blocks_of(model.text_encoder.core)):
            blocks |= dict.fromkeys(block.parameters(), number)
    for name, parameter in model.named_parameters():
        placement, own = splits.get(parameter), name.split(".")
        unit = own[0] if own[0].endswith("_encoder") else ROOT
        if own[0] == "layers":
            unit = f"layers.{own[1]}"
        elif own[0] in ("norm", "output"):
            unit = HEAD
        elif parameter in blocks:
            unit = f"text_encoder.{blocks[parameter]}"
        yield Weight(
            name,
            tuple(parameter.shape),
            parameter.requires_grad,
            placement.dim if isinstance(placement, Shard) else None,
            parameter in products,
            unit,
        )


def _known_ids(config: JobConfig, source: HFEncoderSpec | None) -> tuple[int, str]:
    """(token ids as far as they are known, what the others are of)."""
    encoder, fields = config.encoder, config.data.conditioning
    if encoder.vocab_size:
        return encoder.vocab_size, ""
    unit, unknown = unit_of(encoder.model), [f"values of {name}" for name in fields]
    if source is None and unit in ("chars", PHONES, SUBWORDS):
        unknown.insert(0, "characters, phones or pieces of the texts")
    # The embedding of each field has a row for an unknown value.
    count = Vocabulary("bytes" if source else unit, "", {name: () for name in fields}).size
    if source is not None:
        count += source.vocab_size - Vocabulary("bytes").size
    return count, ", ".join(unknown)
