"""A CTC head that reads the decoder's hidden states in training only.

It predicts the text that is spoken in each frame, which the blocks before it therefore learn. A loss on
frames alone teaches that slowly, since most of it is sound (A-DMA, Wang et al. 2025, arXiv 2505.19595).
"""

from collections.abc import Iterable

import torch
from torch import nn

from torchtitan.models.dit_tts.model.layers import RMSNorm

CTC_CLASSES = 257
"""Class 0 is the blank, class 1 + b the byte b"""


def is_of_head(name: str) -> bool:
    """Whether the model's parameter of this name belongs to the alignment head."""
    return name.startswith("alignment.")


def parameter_counts(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[int, int]:
    """Numbers of parameters (of the model, of its alignment head), from `named_parameters`."""
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
