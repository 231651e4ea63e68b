"""Packs the texts of a batch into few rows of an encoder, with several texts and little padding per row. A text sees
only itself: tokens attend where their segments are equal, and positions count from the start of each text. Rows are
packed on the CPU with the batch, so the accelerator never waits for a length."""

from dataclasses import dataclass

import numpy as np
import torch

ROW_TOKENS = 512
"""target length of a packed row: enough for texts to fit together closely, few enough for attention
over a row to cost little compared to the matmuls"""

# Tokens by which a row may be longer than the mean of all, as texts are not cut.
_SLACK = 4
_LENGTHS_TRIED = 4


@dataclass(frozen=True)
class TextRows:
    """The R rows of W tokens in which the texts of a batch (B, L) go through an encoder.

    Attributes:
        token: (R, W) int64, index into the flattened (B·L) ids; 0 at padding.
        segment: (R, W) int64, number of the text within its row from 1; 0 at padding.
        position: (R, W) int64, index in the text from 0.
        origin: (B, L) int64, index of each token's features in the flattened rows; at padding one past the last.
    """

    token: torch.Tensor
    segment: torch.Tensor
    position: torch.Tensor
    origin: torch.Tensor

    @property
    def same_segment(self) -> torch.Tensor:
        """(R, 1, W, W) bool, true where query and key are of one text. Padding sees padding, so no
        softmax row is empty."""
        return (self.segment[:, :, None] == self.segment[:, None, :])[:, None]

    @property
    def shape(self) -> tuple[int, int]:
        """(R, W)"""
        return self.token.shape[0], self.token.shape[1]

    def to(self, device: torch.device | str) -> "TextRows":
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if torch.device(device).type == "cuda" and not tensor.is_cuda:
                tensor = tensor.pin_memory()  # else the copy waits for the device
            return tensor.to(device, non_blocking=True)

        return TextRows(*map(moved, (self.token, self.segment, self.position, self.origin)))


def pack_rows(
    valid: np.ndarray, packed: bool = True, samples: np.ndarray | None = None, longest: int = 0
) -> TextRows:
    """Lays out the texts of a batch.

    Args:
        valid: (B, L) bool, true at the tokens that the encoder reads.
        packed: several texts per row; else one.
        samples: (S,) lengths of the samples, with conditioning tokens, that stand in the one row of `valid`.
        longest: tokens of a text at most. Then few shapes occur, for a compiled encoder: all rows are equally long, and
            packed ones are as many as a power of two or three halves of one. 0: the layout with the fewest tokens.
    """
    batch, padded = valid.shape
    if samples is None:
        lengths = valid.sum(1)
    else:
        ends = samples.cumsum()
        before = np.append(0, valid.cumsum())
        lengths = before[ends] - before[ends - samples]
    *tokens_of, _ = np.split(np.flatnonzero(valid), lengths.cumsum())
    order = np.argsort(-lengths, kind="stable")
    # Kernels want aligned rows. A longer text than any of training has a shape of its own.
    width = -(-longest // 8) * 8 if longest >= lengths.max(initial=0) else 0
    if not packed:
        rows = [[int(text)] for text in order]
    elif width:
        width *= -(-ROW_TOKENS // width)
        rows = _best_fit(order, lengths, width)
        power = 1 << (len(rows) - 1).bit_length()
        rows += [[]] * ((power if 3 * power < 4 * len(rows) else 3 * power // 4) - len(rows))
    else:
        rows = _fewest_padded(order, lengths)
    width = width or max(1, *(int(lengths[row].sum()) for row in rows))
    token, segment, position = (np.zeros((len(rows), width), np.int64) for _ in range(3))
    origin = np.full(batch * padded, token.size, np.int64)
    for number, row in enumerate(rows):
        at = 0
        for which, text in enumerate(row, start=1):
            count = np.arange(lengths[text])
            inside = slice(at, at + len(count))
            token[number, inside] = tokens_of[text]
            segment[number, inside] = which
            position[number, inside] = count
            origin[tokens_of[text]] = number * width + at + count
            at += len(count)
    origin = origin.reshape(batch, padded)
    return TextRows(*map(torch.from_numpy, (token, segment, position, origin)))


def _fewest_padded(order: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Texts (numbers by falling length) of each row, at several lengths of a row; the layout with the fewest tokens."""
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    fewest = max(1, -(-total // ROW_TOKENS))
    # Many texts fit together at any length; of a few, one length wastes a third and the next nothing.
    tried = range(fewest, fewest + (_LENGTHS_TRIED if len(lengths) <= 64 else 1))
    widths = {max(longest, -(-total // count) + _SLACK) for count in tried}
    layouts = [_best_fit(order, lengths, width) for width in sorted(widths)]

    def tokens(rows: list[list[int]]) -> int:
        return len(rows) * max(int(lengths[row].sum()) for row in rows)

    return min(layouts, key=tokens)


def _best_fit(order: np.ndarray, lengths: np.ndarray, width: int) -> list[list[int]]:
    """Texts of each row, at most `width` tokens together."""
    rows: list[list[int]] = []
    # Rows by the number of their free tokens.
    rows_with_free: list[list[int]] = [[] for _ in range(width + 1)]
    for text in order.tolist():
        length = int(lengths[text])
        free = next((f for f in range(length, width + 1) if rows_with_free[f]), None)
        if free is None:
            row, free = len(rows), width
            rows.append([])
        else:
            row = rows_with_free[free].pop()
        rows[row].append(text)
        rows_with_free[free - length].append(row)
    return rows
