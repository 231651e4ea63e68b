"""Which tensors of Echo-TTS and Irodori-TTS are which of ours, and how they lie in them: both directions of a
conversion follow from one table. Both projects have the same names.

Theirs has a matrix for each of q, k, v, gate, and a rotary pair in neighbouring channels. Ours fuses matrices, block
by block, and has a pair in channels (i, i + K/2) of a head of K: the order of channels of q and k changes no product.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.attention import GatedAttention, JointAttention
from torchtitan.models.dit_tts.model.encoders import EncoderBlock
from torchtitan.models.dit_tts.model.layers import GatedMLP
from torchtitan.models.dit_tts.model.model import DiTTTSModel, LowRankAdaLN
from torchtitan.models.dit_tts.text.vocabulary import BEGIN_ID, FIRST_BYTE_ID, named

_SHOWN = 5

_DIVISOR = 6
"""of the speaker encoder's input in their forward pass; ours has it in the weights"""


@dataclass(frozen=True)
class Fused:
    """One of our tensors from parts of equal shape: in each of the blocks some rows of every part, one after the
    other."""

    parts: tuple[str, ...]
    blocks: int = 1
    paired: tuple[int, ...] = ()
    """numbers of the parts whose rows in a block are a head's channels in rotary pairs"""

    vector: bool = False
    """of the norms of heads: channels without columns"""

    divided: bool = False
    """by _DIVISOR, in float64, whose rounding is undone by that to the dtype of the parts"""

    def part_shape(self, ours: torch.Size) -> torch.Size:
        count = len(self.parts)
        return ours if count == 1 else torch.Size([ours[0] // count, *ours[1:]])

    def _rows(self, part: torch.Size) -> tuple[int, int, int]:
        """(blocks, rows of a part in a block, columns)."""
        rows = (part.numel() if self.vector else part[0]) // self.blocks
        return self.blocks, rows, part.numel() // (self.blocks * rows)

    def pack(self, parts: list[Tensor], ours: torch.Size) -> Tensor:
        """Our tensor, of shape `ours`."""
        placed = [part.reshape(self._rows(part.shape)) for part in parts]
        for number in self.paired:
            placed[number] = placed[number].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        packed = torch.stack(placed, dim=1).reshape(ours)
        return packed.double() / _DIVISOR if self.divided else packed

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The parts of our tensor; `dtype` of one that was divided."""
        shape = self.part_shape(packed.shape)
        blocks, rows, columns = self._rows(shape)
        placed = list(packed.reshape(blocks, -1, rows, columns).unbind(1))
        for number in self.paired:
            placed[number] = placed[number].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        parts = [part.reshape(shape).contiguous() for part in placed]
        return [(part.double() * _DIVISOR).to(dtype) for part in parts] if self.divided else parts


@dataclass(frozen=True)
class ByteRows:
    """Our embedding of bytes from Echo-TTS's, whose row 0 is both the begin of a text and the byte 0, which no text
    has. Our rows for padding and for an end, which it has not, are zero and never read."""

    parts: tuple[str, ...]

    def part_shape(self, ours: torch.Size) -> torch.Size:
        return torch.Size([256, ours[1]])

    def pack(self, parts: list[Tensor], ours: torch.Size) -> Tensor:
        [rows] = parts
        packed = rows.new_zeros(ours)
        packed[BEGIN_ID], packed[FIRST_BYTE_ID:] = rows[0], rows
        return packed

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> list[Tensor]:
        rows = packed[FIRST_BYTE_ID:].clone()
        rows[0] = packed[BEGIN_ID]
        return [rows]


Table = Mapping[str, Fused | ByteRows]
"""by the name of our parameter"""

_EMBEDDING = "text_encoder.text_embedding.weight"
_SINGLE = {
    "text_encoder.norm.weight": "text_norm.weight",
    "speaker_encoder.norm.weight": "speaker_norm.weight",
    **{f"timestep.layers.{n}.weight": f"cond_module.{n}.weight" for n in (0, 2, 4)},
    **{
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in (("input", "in_proj"), ("output", "out_proj"))
        for kind in ("weight", "bias")
    },
    "norm.weight": "out_norm.weight",
}
_MODULATION = tuple(
    f"{where}_adaln.{what}" for what in ("shift", "scale", "gate") for where in ("attention", "mlp")
)
"""order of our rows"""


def conversion_table(model: DiTTTSModel, bytes_from_echo: bool) -> Table:
    """The table of a model, which may be on the meta device.

    >>> conversion_table(model, True)["layers.3.attention.speaker_kv.weight"].parts
    ('blocks.3.attention.wk_speaker.weight', 'blocks.3.attention.wv_speaker.weight')
    """
    found: dict[str, Fused | ByteRows] = {ours: Fused((each,)) for ours, each in _SINGLE.items()}
    found["text_encoder.embedding.weight"] = (ByteRows if bytes_from_echo else Fused)((_EMBEDDING,))
    for kind in ("weight", "bias"):
        their = f"speaker_encoder.in_proj.{kind}"
        found[f"speaker_encoder.input.{kind}"] = Fused((their,), divided=True)

    for name, module in model.named_modules():
        block, _, _ = name.replace("layers.", "blocks.").rpartition(".")

        def add(ours: str, parts: tuple[str, ...], blocks: int = 1, paired: tuple[int, ...] = ()):
            found[f"{name}.{ours}"] = Fused(
                tuple(f"{block}.{part}" for part in parts), blocks, paired
            )

        if isinstance(module, GatedAttention):
            heads = module.n_heads
            fused = {"qkv_gate": (("wq", "wk", "wv", "gate"), (0, 1)), "out": (("wo",), ())}
            if isinstance(module, JointAttention):
                fused |= {
                    f"{kind}_kv": ((f"wk_{kind}", f"wv_{kind}"), (0,))
                    for kind in ("text", "speaker")
                }
            for ours, (parts, paired) in fused.items():
                blocks = heads if len(parts) > 1 else 1
                add(
                    f"{ours}.weight",
                    tuple(f"attention.{each}.weight" for each in parts),
                    blocks,
                    paired,
                )
            for norm in ("q_norm", "k_norm"):
                their = f"{block}.attention.{norm}.weight"
                found[f"{name}.{norm}.weight"] = Fused((their,), heads, (0,), vector=True)
        elif isinstance(module, GatedMLP):
            blocks = module.down.in_features // module.block
            add("gate_and_up.weight", ("mlp.w1.weight", "mlp.w3.weight"), blocks)
            add("down.weight", ("mlp.w2.weight",))
        elif isinstance(module, LowRankAdaLN):
            for ours, kind in (("down", "weight"), ("up", "weight"), ("up", "bias")):
                add(f"{ours}.{kind}", tuple(f"{each}_{ours}.{kind}" for each in _MODULATION))
        elif isinstance(module, EncoderBlock):
            for norm in ("attention_norm", "mlp_norm"):
                theirs = name.replace("layers.", "blocks.")
                found[f"{name}.{norm}.weight"] = Fused((f"{theirs}.{norm}.weight",))
    return found


def to_ours(
    table: Table, model: DiTTTSModel, theirs: Mapping[str, Tensor], where: Path
) -> dict[str, Tensor]:
    """Our weights. Raises InputError for a tensor that is missing, unknown or of another shape."""
    shapes = {name: value.shape for name, value in model.named_parameters()}
    wanted = {
        part: entry.part_shape(shapes[name])
        for name, entry in table.items()
        for part in entry.parts
    }
    _compare({name: value.shape for name, value in theirs.items()}, wanted, where)
    return {
        name: entry.pack([theirs[part] for part in entry.parts], shapes[name])
        for name, entry in table.items()
    }


def to_theirs(table: Table, ours: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Their weights. Raises InputError for a tensor for which they have no place."""
    _compare(ours, dict.fromkeys(table), where)
    dtype = ours["input.weight"].dtype
    found: dict[str, Tensor] = {}
    for name, entry in table.items():
        found |= zip(entry.parts, entry.unpack(ours[name], dtype), strict=True)
    return found


def _compare(found: Mapping, wanted: Mapping, where: Path) -> None:
    """By names, and by shapes where both have the name."""
    faults = {
        "missing": [name for name in wanted if name not in found],
        "unknown": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} {tuple(found[name])} instead of {tuple(shape)}"
            for name, shape in wanted.items()
            if shape is not None and name in found and found[name] != shape
        ],
    }
    for fault, names in faults.items():
        if names:
            raise InputError(
                f"{where} has other tensors than this model: {fault} {'is' if len(names) == 1 else 'are'} "
                f"{named(sorted(names), _SHOWN)}"
            )
