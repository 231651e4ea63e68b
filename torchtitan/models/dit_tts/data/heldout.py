"""Held-out recordings, which training must not use, are known by the names of their folders."""

import glob
import os
from collections.abc import Sequence
from typing import Any

from torchtitan.models.dit_tts.data.storage import plain_name
from torchtitan.models.dit_tts.files import is_remote, matching_shards

HELDOUT_PREFIXES = ("held", "dev", "val", "eval", "test")
HELDOUT_FOLDER = "heldout"  # as titan-tts prepare names it
FEW_SAMPLES = 10
"""Held-out samples below which prepare and training warn"""


def split_of(value: Any) -> str | None:
    """The split that a name stands for, "train" or "heldout"; None for an unknown name."""
    name = str(value or "").strip().lower()
    if name.startswith("train"):
        return "train"
    return "heldout" if name.startswith(HELDOUT_PREFIXES) else None


def heldout_shards(tar_paths: Sequence[str]) -> list[bool]:
    """True for each shard that holds held-out recordings: its folder is named as titan-tts prepare names it, on this
    machine, behind a link or in a URL; or it has another name of a held-out split and lies next to training shards."""
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
    beside = os.path.join(glob.escape(os.path.dirname(folder)), "[Tt]rain*", "*")
    return "heldout" in map(split_of, names) and bool(matching_shards(beside))
