"""The same samples in one row that a padded batch has in rows of its own."""

import torch

from torchtitan.models.dit_tts.streams import PackedStreams, stream_of

PATCH = 4


def in_one_row(padded: torch.Tensor, lengths: list[int], size: int, multiple: int = 1):
    """(B, L, ...) to (1, size, ...): the valid positions of each row, zeros up to a multiple of `multiple`."""
    parts = [row[: -(-n // multiple) * multiple] for row, n in zip(padded, lengths, strict=True)]
    joined = torch.cat(parts)
    out = joined.new_zeros(1, size, *joined.shape[1:])
    out[0, : len(joined)] = joined
    return out


def streams(
    frames: list[int], text: list[int], speaker: list[int], sizes, longest
) -> PackedStreams:
    """Of samples with these lengths in rows of `sizes` positions; a sample has at most `longest`."""
    patches = [-(-n // PATCH) for n in speaker]
    lengths = frames, text, patches
    return PackedStreams(
        *(
            stream_of(torch.tensor(n), *each)
            for n, *each in zip(lengths, sizes, longest, strict=True)
        )
    )
