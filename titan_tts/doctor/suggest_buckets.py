"""Length buckets and batch sizes that suit a dataset, and the padding of each choice."""

import os
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_tts.doctor.checks import text_tokens
from titan_tts.doctor.findings import Limits
from torchtitan.models.dit_tts.config.data_sections import MAX_BUCKETS, Data
from torchtitan.models.dit_tts.data.buckets import (
    ALIGNMENT,
    choose_edges,
    make_batch_policy,
    round_up,
)
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.heldout import heldout_shards
from torchtitan.models.dit_tts.data.left_out import samples_left_out

WASTE_TOLERANCE = 0.02
# Of the speech, by each of the two limits.
MAX_LOST = 0.005


def suggest(dataset: Dataset, limits: Limits, paths: Sequence[str]) -> dict[str, Any] | None:
    """Suggested [data] keys for the training samples within the limits, if any; `paths` as the user gave them."""
    tokens = text_tokens(dataset, limits)
    held = np.array(heldout_shards(dataset.tar_paths))
    training = ~held[dataset.shard]
    data = Data(
        max_frames=_limit(limits.max_frames, Data.max_frames, dataset.frames, dataset, training),
        max_text_tokens=_limit(
            limits.max_text_tokens, Data.max_text_tokens, tokens, dataset, training
        ),
    )
    fits = (dataset.frames <= data.max_frames) & (tokens <= data.max_text_tokens)
    left_out = samples_left_out(dataset, training & ~fits, limits.frames_per_second, training)
    lost = int((training & ~fits).sum())
    fits &= training
    if not fits.any():
        return None
    frames = dataset.frames[fits].astype(np.int64)
    choices = bucket_choices(frames, data.max_frames)
    useful = [choice["useful_fraction"] for choice in choices]
    # More buckets are more compiled shapes: fewer are suggested where they waste only this much more.
    chosen = 1 + next(n for n, each in enumerate(useful) if each >= max(useful) - WASTE_TOLERANCE)
    data.num_buckets = chosen
    lengths = frames, dataset.reference_frames[fits], tokens[fits]
    policy = make_batch_policy(data, data.batch_multiple, *lengths)
    max_frames, max_text, max_reference = map(max, zip(*policy.shapes))
    keys = {
        "max_frames": max_frames,
        "max_speaker_frames": max_reference,
        "max_text_tokens": max_text,
        "num_buckets": chosen,
        "bucket_frames": list(policy.edges),
    }
    if not lengths[1].any():  # none is stored: training draws them, of any length
        del keys["max_speaker_frames"]
    for_training, for_tests = (split_paths(dataset, paths, held == side) for side in (False, True))
    path = for_training[0] if len(for_training) == 1 else for_training
    pasted = {"path": path, **keys}
    return {
        "samples": int(fits.sum()),
        "left_out": lost,
        "left_out_words": left_out,
        "held_out": int((~training).sum()),
        "paths": {"training": for_training, "held_out": for_tests},
        **keys,
        "padding_fraction": round(1 - policy.useful_fraction, 6),
        "text_padding_fraction": round(1 - policy.useful_text_fraction, 6),
        "reference_padding_fraction": round(1 - policy.useful_reference_fraction, 6),
        "choices": choices,
        "command_line": shlex.join(
            f"--data.{k}={','.join(map(str, v)) if isinstance(v, list) else v}"
            for k, v in pasted.items()
        ),
    }


def _limit(
    given: int | None, usual: int, lengths: np.ndarray, dataset: Dataset, training: np.ndarray
) -> int:
    """The given limit of lengths (n,), else the usual one or, if higher, what all but `MAX_LOST` of the frames of the
    training samples need."""
    if given is not None:
        return given
    order = np.flatnonzero(training)[np.argsort(lengths[training], kind="stable")]
    kept = np.cumsum(dataset.frames[order], dtype=np.int64)
    if not len(order):
        return usual
    needed = lengths[order[np.searchsorted(kept, (1 - MAX_LOST) * kept[-1])]]
    return max(usual, round_up(int(needed), ALIGNMENT))


def split_paths(dataset: Dataset, paths: Sequence[str], chosen: np.ndarray) -> list[str]:
    """`paths` of chosen (shards,) only: an entry with others, too, becomes the chosen ones' folders."""
    kept: dict[str, None] = {}
    for number, path in enumerate(paths):
        own = np.unique(dataset.shard[dataset.source == number])
        folders = [os.path.dirname(dataset.tar_paths[shard]) for shard in own[chosen[own]]]
        kept |= dict.fromkeys([path] if len(folders) == len(own) else folders)
    return list(kept)


def bucket_choices(frames: np.ndarray, max_frames: int) -> list[dict[str, Any]]:
    """Return edges and the useful fraction of the padded frames, for 1 to `MAX_BUCKETS` buckets."""
    choices = []
    for buckets in range(1, MAX_BUCKETS + 1):
        edges = np.array(choose_edges(frames, buckets, max_frames))
        padded = edges[np.searchsorted(edges, frames)].sum()
        useful = round(float(frames.sum() / padded), 6)
        choices.append({"buckets": buckets, "edges": edges.tolist(), "useful_fraction": useful})
    return choices
