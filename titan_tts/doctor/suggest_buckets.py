"""Length buckets and batch sizes that suit a dataset, and the padding of each choice."""

import json
import os
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_tts.doctor.checks import text_tokens
from titan_tts.doctor.findings import Limits
from torchtitan.models.dit_tts.config.job_config import MAX_BUCKETS, Data
from torchtitan.models.dit_tts.data.buckets import ALIGNMENT, choose_edges, make_batch_policy
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.heldout import heldout_shards

# More buckets are more compiled shapes: fewer are suggested where they waste only this much more.
WASTE_TOLERANCE = 0.02
BATCH_MULTIPLE = 8
GLOBAL_BATCH_SIZE = 32
SPEAKER_PATCH_SIZE = 4


def suggest(
    dataset: Dataset,
    limits: Limits,
    *,
    paths: Sequence[str],
    max_speaker_frames: int,
    batch_frames: int = 0,
) -> dict[str, Any] | None:
    """Suggested [data] and [training] keys for the training samples within the limits, if any.

    `paths` are as the user gave them. 0 `batch_frames` are `GLOBAL_BATCH_SIZE` of the longest samples.
    """
    tokens = text_tokens(dataset, limits)
    training = ~np.array(heldout_shards(dataset.tar_paths))[dataset.shard]
    fits = (dataset.frames <= limits.max_frames) & (tokens <= limits.max_text_tokens)
    left_out = int((training & ~fits).sum())
    fits &= training
    if not fits.any():
        return None
    frames = dataset.frames[fits].astype(np.int64)
    choices = bucket_choices(frames, limits.max_frames)
    chosen = fewest_buckets([choice["useful_fraction"] for choice in choices]) + 1

    max_frames = min(limits.max_frames, _round_up(int(frames.max())))
    max_text = min(limits.max_text_tokens, _round_up(int(tokens[fits].max())))
    longest = choices[chosen - 1]["edges"][-1]
    samples = batch_frames // longest if batch_frames else GLOBAL_BATCH_SIZE
    data = Data(
        max_frames=max_frames,
        max_speaker_frames=max_speaker_frames,
        max_text_tokens=max_text,
        num_buckets=chosen,
        batch_multiple=BATCH_MULTIPLE,
        speaker_patch_size=SPEAKER_PATCH_SIZE,
    )
    global_batch_size = max(1, samples // BATCH_MULTIPLE) * BATCH_MULTIPLE
    lengths = frames, dataset.reference_frames[fits], tokens[fits]
    policy = make_batch_policy(data, global_batch_size, *lengths)
    buckets = [
        {
            "frames": shape[0],
            "text_tokens": shape[1],
            "reference_frames": shape[2],
            "samples": count,
            "batch_size": size,
            "batch_frames": size * shape[0],
            "batches_per_epoch": round(count / size, 2),
        }
        for shape, count, size in zip(
            policy.shapes, policy.sample_counts, policy.batch_sizes, strict=True
        )
    ]
    keys = {
        "max_frames": max_frames,
        "max_speaker_frames": max_speaker_frames,
        "max_text_tokens": max_text,
        "num_buckets": chosen,
        "bucket_frames": list(policy.edges),
    }
    paths = training_paths(dataset, paths)
    path = paths[0] if len(paths) == 1 else paths
    sections: dict[str, dict[str, Any]] = {
        "training": {"global_batch_size": policy.batch_sizes[-1]},
        "data": {"path": path, **keys},
    }
    return {
        "samples": int(fits.sum()),
        "left_out": left_out,
        "held_out": int((~training).sum()),
        **keys,
        **sections["training"],
        "padding_fraction": round(1 - policy.useful_fraction, 6),
        "text_padding_fraction": round(1 - policy.useful_text_fraction, 6),
        "reference_padding_fraction": round(1 - policy.useful_reference_fraction, 6),
        "buckets": buckets,
        "choices": choices,
        "toml": toml_tables(sections),
        "command_line": command_line(sections),
    }


def training_paths(dataset: Dataset, paths: Sequence[str]) -> list[str]:
    """`paths` without held-out shards: an entry with both kinds becomes the folders of the others."""
    held = heldout_shards(dataset.tar_paths)
    kept: dict[str, None] = {}
    for number, path in enumerate(paths):
        own = np.unique(dataset.shard[dataset.source == number])
        training = [dataset.tar_paths[shard] for shard in own if not held[shard]]
        whole = len(training) == len(own)
        kept |= dict.fromkeys([path] if whole else map(os.path.dirname, training))
    return list(kept)


def bucket_choices(frames: np.ndarray, max_frames: int) -> list[dict[str, Any]]:
    """For 1 to `MAX_BUCKETS` buckets: their edges and the useful fraction of the padded frames."""
    choices = []
    for buckets in range(1, MAX_BUCKETS + 1):
        edges = np.array(choose_edges(frames, buckets, max_frames))
        padded = edges[np.searchsorted(edges, frames)].sum()
        useful = round(float(frames.sum() / padded), 6)
        choices.append({"buckets": buckets, "edges": edges.tolist(), "useful_fraction": useful})
    return choices


def fewest_buckets(useful_fractions: Sequence[float]) -> int:
    """Index of the first choice that is at most `WASTE_TOLERANCE` below the best."""
    enough = max(useful_fractions) - WASTE_TOLERANCE
    return next(index for index, useful in enumerate(useful_fractions) if useful >= enough)


def toml_tables(sections: dict[str, dict[str, Any]]) -> str:
    tables = []
    for section, keys in sections.items():
        # JSON's strings, numbers and lists of them are TOML's.
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
        tables.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(tables)


def command_line(sections: dict[str, dict[str, Any]]) -> str:
    """Sections of a config as options, whose lists have commas."""
    return shlex.join(
        f"--{section}.{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for section, keys in sections.items()
        for key, value in keys.items()
    )


def _round_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT
