"""Names and layouts of Echo-TTS's and Irodori-TTS's tensors among ours: both directions of a
conversion follow from one table. Both projects have the same names.

Theirs has a matrix for each of q, k, v, gate, and a rotary pair in neighbouring channels. Ours fuses matrices, block
by block, and has a pair in channels (i, i + K/2) of a head of K: the order of channels of q and k changes no product.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.model.attention import (
    GatedAttention,
    JointAttention,
    SelfAttention,
)
from torchtitan.models.dit_tts.model.encoders import EncoderBlock
from torchtitan.models.dit_tts.model.layers import GatedMLP
from torchtitan.models.dit_tts.model.model import DiTTTSModel, TransformerBlock
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
    """Our embedding of bytes from Echo-TTS's, whose row 0 is both the start of a text and the byte 0, which no text
    has. Our rows for padding, which is masked, and for an end, which its texts lack, are zero."""

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


def _adaln(kind: str) -> Fused:
    whats, wheres = ("shift", "scale", "gate"), ("attention", "mlp")
    return Fused(tuple(f"{where}_adaln.{what}_{kind}" for what in whats for where in wheres))


# Our name, below a module's, and theirs, below that of their module, which is called alike.
_ATTENTION = {
    "qkv_gate.weight": Fused(("wq.weight", "wk.weight", "wv.weight", "gate.weight"), paired=(0, 1)),
    "out.weight": Fused(("wo.weight",)),
    "q_norm.weight": Fused(("q_norm.weight",), paired=(0,), vector=True),
    "k_norm.weight": Fused(("k_norm.weight",), paired=(0,), vector=True),
}
_OF_MODULES: dict[type[nn.Module], dict[str, Fused]] = {
    JointAttention: {
        **_ATTENTION,
        "text_kv.weight": Fused(("wk_text.weight", "wv_text.weight"), paired=(0,)),
        "speaker_kv.weight": Fused(("wk_speaker.weight", "wv_speaker.weight"), paired=(0,)),
    },
    SelfAttention: _ATTENTION,
    GatedMLP: {
        "gate_and_up.weight": Fused(("w1.weight", "w3.weight")),
        "down.weight": Fused(("w2.weight",)),
    },
    TransformerBlock: {
        "adaln.down.weight": _adaln("down.weight"),
        "adaln.up.weight": _adaln("up.weight"),
        "adaln.up.bias": _adaln("up.bias"),
    },
    EncoderBlock: {
        "attention_norm.weight": Fused(("attention_norm.weight",)),
        "mlp_norm.weight": Fused(("mlp_norm.weight",)),
    },
}
_OF_MODEL = {
    "text_encoder.embedding.weight": "text_encoder.text_embedding.weight",
    "text_encoder.norm.weight": "text_norm.weight",
    "speaker_encoder.input.weight": "speaker_encoder.in_proj.weight",
    "speaker_encoder.input.bias": "speaker_encoder.in_proj.bias",
    "speaker_encoder.norm.weight": "speaker_norm.weight",
    "caption_encoder.embedding.weight": "caption_encoder.text_embedding.weight",
    "caption_encoder.norm.weight": "caption_norm.weight",
    **{f"timestep.layers.{n}.weight": f"cond_module.{n}.weight" for n in (0, 2, 4)},
    "input.weight": "in_proj.weight",
    "input.bias": "in_proj.bias",
    "norm.weight": "out_norm.weight",
    "output.weight": "out_proj.weight",
    "output.bias": "out_proj.bias",
}


def conversion_table(model: DiTTTSModel, of_bytes: bool) -> Table:
    """The table of a model, which may be on the meta device; `of_bytes`: its texts are Echo-TTS's."""
    left_out = "speaker_encoder." if model.speaker_encoder is None else "caption_encoder."
    found: dict[str, Fused | ByteRows] = {
        ours: Fused((theirs,), divided=ours.startswith("speaker_encoder.input."))
        for ours, theirs in _OF_MODEL.items()
        if not ours.startswith(left_out)
    }
    if of_bytes:
        found |= {name: ByteRows(found[name].parts) for name in found if "embedding" in name}
    for name, module in model.named_modules():
        theirs, blocks = name.replace("layers.", "blocks."), 1
        if isinstance(module, GatedAttention):
            blocks = module.n_heads
        elif isinstance(module, GatedMLP):
            blocks = module.down.in_features // module.block
        for ours, row in _OF_MODULES.get(type(module), {}).items():
            parts = tuple(f"{theirs}.{part}" for part in row.parts)
            if left_out == "speaker_encoder.":  # theirs have either, too
                parts = tuple(part.replace("_speaker.", "_caption.") for part in parts)
            found[f"{name}.{ours}"] = replace(row, parts=parts, blocks=blocks)
    return found


def to_ours(
    table: Table, model: DiTTTSModel, theirs: Mapping[str, Tensor], where: Path
) -> dict[str, Tensor]:
    """Our weights. Raises InputError for a tensor that is missing, unknown or of another shape."""
    shapes = {name: value.shape for name, value in model.named_parameters()}
    wanted = {p: row.part_shape(shapes[name]) for name, row in table.items() for p in row.parts}
    _compare({name: value.shape for name, value in theirs.items()}, wanted, where)
    return {
        name: row.pack([theirs[part] for part in row.parts], shapes[name])
        for name, row in table.items()
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
    """Raise InputError unless the tensors have the same names, and the same shapes by name."""
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
        shown = named(sorted(names), _SHOWN)
        require(not names, f"{where} has other tensors than this model; {fault}: {shown}")
