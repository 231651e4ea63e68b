"""Which length buckets and batch sizes suit a dataset, and how much padding each choice costs."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.config.job_config import MAX_BUCKETS
from torchtitan.models.dit_tts.data.buckets import ALIGNMENT, choose_edges, make_batch_policy
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.doctor.checks import Limits, text_tokens

# More buckets are more compiled shapes: fewer are suggested where they waste this little more.
WASTE_TOLERANCE = 0.02
RANDOM_BATCH = 32
BATCH_MULTIPLE = 8
GLOBAL_BATCH_SIZE = 32
SPEAKER_PATCH_SIZE = 4


def suggest(
    dataset: Dataset,
    limits: Limits,
    *,
    max_speaker_frames: int,
    batch_frames: int = 0,
    seed: int = 0,
) -> dict[str, Any] | None:
    """Suggested ``[data]`` and ``[training]`` keys for the samples within the limits.

    Args:
        max_speaker_frames: longest reference, as in ``[data]``; a multiple of the speaker patch.
        batch_frames: latent frames in a global batch; 0: ``GLOBAL_BATCH_SIZE`` longest samples.
        seed: of the random batches that are compared.

    Returns:
        Plain JSON, as documented in docs/inspection.md; None where no sample is within the limits.
    """
    tokens = text_tokens(dataset, limits)
    fits = (dataset.frames <= limits.max_frames) & (tokens <= limits.max_text_tokens)
    if not fits.any():
        return None
    frames = dataset.frames[fits].astype(np.int64)
    references = dataset.reference_frames[fits]
    choices = bucket_choices(frames, limits.max_frames)
    chosen = fewest_buckets([choice["useful_fraction"] for choice in choices]) + 1

    max_frames = min(limits.max_frames, _round_up(int(frames.max())))
    max_text = min(limits.max_text_tokens, _round_up(int(tokens[fits].max())))
    policy = make_batch_policy(
        frames,
        references,
        tokens[fits],
        max_frames=max_frames,
        max_speaker_frames=max_speaker_frames,
        max_text_tokens=max_text,
        num_buckets=chosen,
        bucket_frames=[],
        global_batch_size=_global_batch_size(batch_frames, choices[chosen - 1]["edges"][-1]),
        batch_multiple=BATCH_MULTIPLE,
        speaker_patch_size=SPEAKER_PATCH_SIZE,
    )
    buckets = [
        {
            "frames": shape[0],
            "text_tokens": shape[1],
            "reference_frames": shape[2],
            "samples": count,
            "batch_size": size,
            "batch_frames": size * shape[0],
            "batches_an_epoch": round(count / size, 2),
        }
        for shape, count, size in zip(
            policy.shapes, policy.sample_counts, policy.batch_sizes, strict=True
        )
    ]
    return {
        "samples": int(fits.sum()),
        "left_out": int((~fits).sum()),
        "num_buckets": chosen,
        "bucket_frames": list(policy.edges),
        "max_frames": max_frames,
        "max_text_tokens": max_text,
        "max_speaker_frames": max_speaker_frames,
        "global_batch_size": policy.batch_sizes[-1],
        "batch_frames": policy.batch_sizes[-1] * policy.edges[-1],
        "buckets": buckets,
        "choices": choices,
        "pad_to_max": {
            "useful_fraction": round(float(frames.mean() / max_frames), 6),
            "shapes": 1,
        },
        "pad_to_batch_max": random_batches(frames, seed),
    }


def bucket_choices(frames: np.ndarray, max_frames: int) -> list[dict[str, Any]]:
    """For 1 to ``MAX_BUCKETS`` buckets: their edges and the useful share of padded frames."""
    choices = []
    for buckets in range(1, MAX_BUCKETS + 1):
        edges = np.array(choose_edges(frames, buckets, max_frames))
        padded = edges[np.searchsorted(edges, frames)].sum()
        choices.append(
            {
                "buckets": buckets,
                "shapes": len(edges),
                "edges": [int(edge) for edge in edges],
                "useful_fraction": round(float(frames.sum() / padded), 6),
            }
        )
    return choices


def fewest_buckets(useful_fractions: Sequence[float]) -> int:
    """Index of the first choice that is at most ``WASTE_TOLERANCE`` below the best."""
    best = max(useful_fractions)
    return next(
        number for number, useful in enumerate(useful_fractions) if useful >= best - WASTE_TOLERANCE
    )


def random_batches(frames: np.ndarray, seed: int) -> dict[str, Any]:
    """What random batches cost, each padded to its own longest sample.

    The last batch may be smaller. Shapes are distinct lengths, rounded up to ``ALIGNMENT``.
    """
    shuffled = np.random.default_rng(seed).permutation(frames)
    starts = np.arange(0, len(shuffled), RANDOM_BATCH)
    longest = _round_up(np.maximum.reduceat(shuffled, starts))
    sizes = np.diff(np.append(starts, len(shuffled)))
    return {
        "batch_size": RANDOM_BATCH,
        "useful_fraction": round(float(frames.sum() / (longest * sizes).sum()), 6),
        "shapes": len(np.unique(longest)),
    }


def toml_lines(suggestion: dict[str, Any], paths: Sequence[str]) -> str:
    """The suggestion as TOML to paste into a config."""
    # JSON's strings and lists of numbers are TOML's.
    path = json.dumps(paths[0] if len(paths) == 1 else list(paths), ensure_ascii=False)
    return "\n".join(
        [
            "[training]",
            f"global_batch_size = {suggestion['global_batch_size']}",
            "",
            "[data]",
            f"path = {path}",
            f"max_frames = {suggestion['max_frames']}",
            f"max_speaker_frames = {suggestion['max_speaker_frames']}",
            f"max_text_tokens = {suggestion['max_text_tokens']}",
            f"num_buckets = {suggestion['num_buckets']}",
            f"bucket_frames = {json.dumps(suggestion['bucket_frames'])}",
        ]
    )


def _global_batch_size(batch_frames: int, longest: int) -> int:
    wanted = batch_frames // longest if batch_frames else GLOBAL_BATCH_SIZE
    return max(1, wanted // BATCH_MULTIPLE) * BATCH_MULTIPLE


def _round_up(value, multiple: int = ALIGNMENT):
    return -(-value // multiple) * multiple
