"""A head that reads the decoder's hidden states while training, and is in no other model.

What it predicts, the text that is spoken in each frame (CTC), makes the blocks before it know it. A loss on
frames alone teaches that slowly, since most of it is sound (A-DMA, Wang et al. 2025, arXiv 2505.19595).
"""

from collections.abc import Iterable

import torch
from torch import nn

from torchtitan.models.dit_tts.model.layers import RMSNorm

CTC_CLASSES = 257
"""the blank, which is class 0, and 1 + the value of each byte"""

_PREFIX = "alignment."
"""before the names of the head's parameters in the model"""


def is_of_head(name: str) -> bool:
    """Whether a parameter of the model, by its name, is one of the alignment head."""
    return name.startswith(_PREFIX)


def parameter_counts(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[int, int]:
    """(of the model, of its alignment head), from `named_parameters`."""
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
