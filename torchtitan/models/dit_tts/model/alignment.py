"""Heads that read the decoder's hidden states while training, and are in no other model.

What they predict makes the blocks before them know it: the text that is spoken in each frame (CTC), and the
features of a pretrained speech encoder (REPA, Yu et al. 2024, arXiv 2410.06940). A loss on frames alone
teaches that slowly, since most of it is sound (A-DMA, Wang et al. 2025, arXiv 2505.19595).
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.layers import RMSNorm

CTC, TEACHER = "ctc", "teacher"
CTC_CLASSES = 257
"""the blank, which is class 0, and 1 + the value of each byte"""

_PREFIX = "alignment."
"""before the names of the heads' parameters in the model"""


def is_of_head(name: str) -> bool:
    """Whether a parameter of the model, by its name, is one of an alignment head."""
    return name.startswith(_PREFIX)


def remove_heads(args: DiTTTSModelArgs) -> None:
    """Makes these the sizes of the same model where it is not trained."""
    args.ctc_layer = args.teacher_layer = args.teacher_dim = 0


def heads_of(args: DiTTTSModelArgs) -> dict[str, int]:
    """Name of each head -> block that it reads, counted from 1."""
    found = {CTC: args.ctc_layer, TEACHER: args.teacher_layer}
    return {name: block for name, block in found.items() if block}


def parameter_counts(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[int, int]:
    """(of the model, of its alignment heads), from `named_parameters`."""
    counts = [0, 0]
    for name, parameter in parameters:
        counts[is_of_head(name)] += parameter.numel()
    return counts[0], counts[1]


class CTCHead(nn.Module):
    """Frames (B, T, D) to logits of the blank and of each byte, (B, T, 257) float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(dim, eps)
        self.output = nn.Linear(dim, CTC_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(x)).float()


class TeacherHead(nn.Module):
    """Frames (B, T, D) to the teacher's features, (B, T, K) float32."""

    def __init__(self, dim: int, width: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(dim, eps)
        self.hidden = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(F.silu(self.hidden(self.norm(x)))).float()


class AlignmentHeads(nn.Module):
    """The heads of a model, each at its block."""

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__()
        self.blocks = heads_of(args)
        if CTC in self.blocks:
            self.ctc = CTCHead(args.dim, args.norm_eps)
        if TEACHER in self.blocks:
            self.teacher = TeacherHead(args.dim, args.teacher_dim, args.norm_eps)

    def forward(self, block: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Outputs of the heads that read x (B, T, D), the output of this block, by their names."""
        return {
            name: self.get_submodule(name)(x) for name, at in self.blocks.items() if at == block
        }
