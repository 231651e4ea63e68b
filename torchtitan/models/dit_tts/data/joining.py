"""What the indexes of several shards come to together."""

import os
from collections.abc import Sequence

import numpy as np

from torchtitan.models.dit_tts.data.index import ShardIndex
from torchtitan.models.dit_tts.data.storage import plain_name


def damaged_samples(indexes: Sequence[ShardIndex]) -> int:
    """Samples that the problems stand for, an estimate where a tar itself is damaged."""
    torn = [any(problem.kind == "shard" for problem in index.problems) for index in indexes]
    whole = [
        len(index) + len(index.problems)
        for index, is_torn in zip(indexes, torn, strict=True)
        if not is_torn
    ]
    usual = int(np.median(whole)) if whole else max(map(len, indexes))
    return sum(
        max(len(index.problems), usual - len(index)) if is_torn else len(index.problems)
        for index, is_torn in zip(indexes, torn, strict=True)
    )


def joined_labels(indexes: Sequence[ShardIndex], name: str) -> tuple[np.ndarray, list[str]]:
    """Each shard's codes of a label, in the codes of one table for all."""
    table: dict[str, int] = {}
    codes = []
    for index in indexes:
        values = index.labels[name]
        # The last entry is what code -1 finds.
        mapping = np.array(
            [table.setdefault(value, len(table)) for value in values] + [-1], dtype=np.int32
        )
        codes.append(mapping[index.columns[f"{name}_code"]])
    return np.concatenate(codes), list(table)


def shard_name(tar_path: str) -> str:
    return os.path.basename(plain_name(tar_path)).removesuffix(".tar")


def shard_names(tar_paths: list[str]) -> list[str]:
    """File names without ``.tar``, after as few parent folders as make each name unique."""
    parts = [plain_name(tar_path).removesuffix(".tar").split("/") for tar_path in tar_paths]
    depth = 1
    while True:
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
        depth += 1
