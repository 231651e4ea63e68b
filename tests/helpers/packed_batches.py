"""The same samples in one row that a padded batch has in rows of its own."""

from typing import Any

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


def packed_batch(batch: dict[str, Any], slots: int, size: int) -> dict[str, Any]:
    """A padded batch of the loader as a packed one with `slots` for samples, and `size` positions of each stream."""
    kinds = {"frames": ("latents",), "speaker_frames": ("speaker",)}
    kinds["text_tokens"] = ("text_ids", "text_positions", "text_features")
    found = dict(batch)
    for lengths, names in kinds.items():
        for name in batch.keys() & names:
            found[name] = in_one_row(
                batch[name], batch[lengths].tolist(), size, PATCH if name == "speaker" else 1
            )
    for name in (*kinds, "row"):
        found[name] = torch.nn.functional.pad(batch[name], (0, slots - len(batch[name])))
    longest = tuple(batch[name].shape[1] for name in ("latents", "text_ids", "speaker"))
    return found | {"longest": longest}
