"""What measures a training must not be in it: held-out shards by their names, and references that hold frames of
their own target."""

import glob
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.data.storage import plain_name
from torchtitan.models.dit_tts.files import is_remote

HELDOUT_PREFIXES = ("held", "dev", "val", "eval", "test")
HELDOUT_FOLDER = "heldout"
"""as titan-tts prepare names the folder of the held-out shards"""
LEAK_FRAMES = 12
"""consecutive frames, all different, that two recordings never share: half a second at 25 per second.
Digital silence gives equal frames in every recording, and a few more at its edges"""


def split_of(value: Any) -> str | None:
    """The split that a name stands for, "train" or "heldout"; None for an unknown name."""
    name = str(value or "").strip().lower()
    if name.startswith("train"):
        return "train"
    return "heldout" if name.startswith(HELDOUT_PREFIXES) else None


def heldout_shards(tar_paths: Sequence[str]) -> list[bool]:
    """Whether each shard holds held-out recordings, which measure a training and are not for it.

    Its folder is named as titan-tts prepare names it, on this machine, behind a link or in a URL; or it
    has another name of a held-out split and lies on this machine beside a folder of training shards.
    """
    folders = [os.path.dirname(plain_name(path)) for path in tar_paths]
    found = {folder: _is_heldout(folder) for folder in dict.fromkeys(folders)}
    return [found[folder] for folder in folders]


def _is_heldout(folder: str) -> bool:
    names = {os.path.basename(folder)}
    if is_remote(folder):
        return HELDOUT_FOLDER in names
    names.add(os.path.basename(os.path.realpath(folder)))
    if HELDOUT_FOLDER in names:
        return True
    beside = os.path.join(glob.escape(os.path.dirname(folder)), "[Tt]rain*", "*.tar")
    return "heldout" in map(split_of, names) and bool(glob.glob(beside))


def is_leak(reference: np.ndarray, latents: np.ndarray) -> bool:
    """Whether a part of `reference` (R, C) is a part of `latents` (T, C), both float32.

    A part is `LEAK_FRAMES` consecutive frames that all differ, or the complete reference where it is
    shorter and not one frame repeated.
    """
    count = min(len(reference), LEAK_FRAMES)
    if not 0 < count <= len(latents):
        return False
    ours, theirs = _frame_hashes(reference), _frame_hashes(latents)
    if not np.isin(ours, theirs).any():  # the usual case, and quick
        return False
    windows = np.lib.stride_tricks.sliding_window_view
    ours, theirs = windows(ours, count), windows(theirs, count)
    distinct = 1 + (np.diff(np.sort(ours, axis=1), axis=1) != 0).sum(axis=1)
    needed = LEAK_FRAMES if count == LEAK_FRAMES else min(2, count)
    keys = _keys(count)
    return bool(np.isin(ours[distinct >= needed] @ keys, theirs @ keys).any())


def _frame_hashes(array: np.ndarray) -> np.ndarray:
    """(n,) uint64 of frames (n, C): sums modulo 2**64 of their values' bits times random numbers."""
    bits = (array + np.float32(0)).view(np.uint32)  # + 0 makes -0 to 0
    return bits.astype(np.uint64) @ _keys(array.shape[1])


@cache
def _keys(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(2**64, size=count, dtype=np.uint64)
