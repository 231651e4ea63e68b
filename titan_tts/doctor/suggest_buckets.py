"""Length buckets and batch sizes that suit a dataset, and the padding of each choice."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_tts.doctor.checks import text_tokens
from titan_tts.doctor.findings import Limits
from torchtitan.models.dit_tts.config.job_config import MAX_BUCKETS, Data
from torchtitan.models.dit_tts.data.buckets import choose_edges, make_batch_policy
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.heldout import heldout_shards, split_of
from torchtitan.models.dit_tts.data.storage import plain_name

# More buckets are more compiled shapes: fewer are suggested where they waste only this much more.
WASTE_TOLERANCE = 0.02
BATCH_MULTIPLE = 8
GLOBAL_BATCH_SIZE = 32
SPEAKER_PATCH_SIZE = 4
_HELD_OUT = re.compile(
    r"(held.?out|dev|val(id(ation)?)?|eval(uation)?|tests?)(?![a-z])", re.IGNORECASE
)


def suggest(
    dataset: Dataset,
    limits: Limits,
    *,
    paths: Sequence[str],
    max_speaker_frames: int,
    batch_frames: int = 0,
) -> dict[str, Any] | None:
    """Suggested [data] and [training] keys for the training samples within the limits, if any.

    `paths` are as the user gave them. Model and GPU decide the batch: it is suggested only for `batch_frames`,
    which are else `GLOBAL_BATCH_SIZE` of the longest samples.
    """
    tokens = text_tokens(dataset, limits)
    held = held_out(dataset.tar_paths)
    training = ~held[dataset.shard]
    fits = (dataset.frames <= limits.max_frames) & (tokens <= limits.max_text_tokens)
    left_out = int((training & ~fits).sum())
    fits &= training
    if not fits.any():
        return None
    frames = dataset.frames[fits].astype(np.int64)
    choices = bucket_choices(frames, limits.max_frames)
    chosen = fewest_buckets([choice["useful_fraction"] for choice in choices]) + 1

    batch = batch_frames // choices[chosen - 1]["edges"][-1] if batch_frames else GLOBAL_BATCH_SIZE
    data = Data(
        max_frames=limits.max_frames,
        max_speaker_frames=max_speaker_frames,
        max_text_tokens=limits.max_text_tokens,
        num_buckets=chosen,
        batch_multiple=BATCH_MULTIPLE,
        speaker_patch_size=SPEAKER_PATCH_SIZE,
    )
    global_batch_size = max(1, batch // BATCH_MULTIPLE) * BATCH_MULTIPLE
    lengths = frames, dataset.reference_frames[fits], tokens[fits]
    policy = make_batch_policy(data, global_batch_size, *lengths)
    max_frames, max_text, max_reference = map(max, zip(*policy.shapes))
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
        "max_speaker_frames": max_reference or max_speaker_frames,
        "max_text_tokens": max_text,
        "num_buckets": chosen,
        "bucket_frames": list(policy.edges),
    }
    for_training, for_tests = (split_paths(dataset, paths, held == side) for side in (False, True))
    path = for_training[0] if len(for_training) == 1 else for_training
    training_keys = {"global_batch_size": policy.batch_sizes[-1]}
    sections: dict[str, dict[str, Any]] = {"training": training_keys} if batch_frames else {}
    sections["data"] = {"path": path, **keys}
    return {
        "samples": int(fits.sum()),
        "left_out": left_out,
        "held_out": int((~training).sum()),
        "paths": {"training": for_training, "held_out": for_tests},
        **keys,
        **training_keys,
        "padding_fraction": round(1 - policy.useful_fraction, 6),
        "text_padding_fraction": round(1 - policy.useful_text_fraction, 6),
        "reference_padding_fraction": round(1 - policy.useful_reference_fraction, 6),
        "buckets": buckets,
        "choices": choices,
        "toml": toml_tables(sections),
        "command_line": command_line(sections),
    }


def held_out(tar_paths: Sequence[str]) -> np.ndarray:
    """(shards,) bool: held-out ones, as training refuses them, or by the name of a folder or file where another
    one is named train."""
    pieces = [re.split(r"[/\\]+", os.path.abspath(plain_name(path))) for path in tar_paths]
    shared = len(os.path.commonprefix(pieces))
    named = np.array([any(map(_HELD_OUT.match, names[shared:])) for names in pieces])
    trains = [any(split_of(name) == "train" for name in names[shared:]) for names in pieces]
    by_name = named & bool((trains & ~named).any())
    return by_name | np.array(heldout_shards(tar_paths))


def split_paths(dataset: Dataset, paths: Sequence[str], chosen: np.ndarray) -> list[str]:
    """`paths` of chosen (shards,) only: an entry with others, too, becomes the chosen ones' folders."""
    kept: dict[str, None] = {}
    for number, path in enumerate(paths):
        own = np.unique(dataset.shard[dataset.source == number])
        folders = [os.path.dirname(dataset.tar_paths[shard]) for shard in own[chosen[own]]]
        kept |= dict.fromkeys([path] if len(folders) == len(own) else folders)
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
