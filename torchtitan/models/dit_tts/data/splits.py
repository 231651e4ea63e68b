"""Which names of splits, subsets and folders stand for held-out data."""

from typing import Any

HELDOUT_PREFIXES = ("held", "dev", "val", "eval", "test")


def split_of(value: Any) -> str | None:
    """The split that a name stands for, "train" or "heldout"; None for an unknown name."""
    name = str(value or "").strip().lower()
    if name.startswith("train"):
        return "train"
    return "heldout" if name.startswith(HELDOUT_PREFIXES) else None
