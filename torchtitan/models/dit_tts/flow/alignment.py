"""The loss of the alignment head, per row, so that any split of a batch has the same sum."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def ctc_sums(
    logits: torch.Tensor,
    frames: Sequence[int],
    text_bytes: torch.Tensor,
    lengths: Sequence[int],
    counted: torch.Tensor,
) -> torch.Tensor:
    """(B,) float32: -log p(text | frames) of each row (CTC, Graves et al. 2006), 0 where it is not
    counted or the text does not fit the frames.

    Args:
        logits: (B, T, 257), the blank first.
        frames: valid frames of each row, like `lengths` on the host, where the kernels need them.
        text_bytes: (B, N) bytes of the texts, anything at padding.
        lengths: bytes of each row.
        counted: (B,) bool.
    """
    log_probs = F.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    losses = F.ctc_loss(
        log_probs,
        text_bytes.long() + 1,
        torch.tensor(frames),
        torch.tensor(lengths),
        reduction="none",
        zero_infinity=True,
    )
    return torch.where(counted, losses, 0.0)
