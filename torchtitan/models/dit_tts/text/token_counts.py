"""Counts the tokens of a dataset's texts, where their length alone does not say how many there are."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from tqdm import tqdm

from torchtitan.models.dit_tts.data.corrupt_samples import read_metadata
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.index import load_column, save_column
from torchtitan.models.dit_tts.data.members import text_of
from torchtitan.models.dit_tts.text.normalize import AS_WRITTEN, Normalizer

_TEXTS_AT_ONCE = 1024


class Counter(Protocol):
    @property
    def fingerprint(self) -> str:
        """A hash of everything that the counts depend on, as a part of a file's name."""
        ...

    def counts(self, texts: list[str]) -> list[int]: ...


class _Letters:
    def __init__(self, unit: str):
        self.fingerprint, self._in_bytes = unit, unit == "bytes"

    def counts(self, texts: list[str]) -> list[int]:
        return [len(t.encode("utf-8", "replace") if self._in_bytes else t) for t in texts]


def count_text_tokens(
    dataset: Dataset,
    tokenizer: Counter,
    part: tuple[int, int] = (0, 1),
    words: Normalizer = AS_WRITTEN,
) -> np.ndarray:
    """Tokens (n,) int32 of each sample's text, or of the longer of both where its verbatim text may stand in for it,
    counted once per shard and stored next to its index. A corrupt text counts its bytes; the loader decides what to do
    about it. `part`: as of `open_dataset`; others' stored counts are read. `words`: writes what the tokenizer reads."""
    number, parts = part
    shards = len(dataset.tar_paths)
    first = np.searchsorted(dataset.shard, np.arange(shards + 1))
    counts = np.zeros(len(dataset), np.int32)
    column = f"tokens-{tokenizer.fingerprint}{words.fingerprint}" + "-verbatim" * dataset.verbatim
    with tqdm(
        desc="counting tokens", total=len(dataset), unit="text", delay=2.0, disable=number > 0
    ) as bar:
        for turn in range(shards):
            shard = (shards * number // parts + turn) % shards
            key = dataset.tar_paths[shard], dataset.digests[shard]
            samples = slice(first[shard], first[shard + 1])
            stored = load_column(*key, column)
            if stored is not None and (stored.shape, stored.dtype) == (
                counts[samples].shape,
                counts.dtype,
            ):
                counts[samples] = stored
                bar.update(len(stored))
                continue
            complete = True
            for start in range(samples.start, samples.stop, _TEXTS_AT_ONCE):
                chunk = range(start, min(start + _TEXTS_AT_ONCE, samples.stop))
                for texts in read_texts(dataset, chunk):
                    found = tokenizer.counts([words(text or "") for text in texts])
                    for sample, text, count in zip(chunk, texts, found, strict=True):
                        known = dataset.text_bytes[sample] if text is None else count
                        counts[sample] = max(counts[sample], known)
                    complete &= None not in texts
                bar.update(len(chunk))
            if complete:  # a shard that is restored has the same digest
                save_column(*key, column, counts[samples])
    return counts


def count_letters(
    dataset: Dataset, unit: str, part: tuple[int, int], words: Normalizer
) -> np.ndarray:
    """(n,) bytes or characters (unit: "bytes" or "chars") of each sample's text; the rest as in `count_text_tokens`."""
    if words.language:
        return count_text_tokens(dataset, _Letters(unit), part, words)
    return dataset.text_bytes if unit == "bytes" else dataset.text_chars


def read_texts(dataset: Dataset, samples: Sequence[int]) -> list[list[str | None]]:
    """The texts of some samples and, where these may stand in for them, their verbatim texts, read at once; None for
    a corrupt one."""
    found = read_metadata(dataset, samples)
    return [
        [None if metadata is None else text_of(metadata, verbatim) for metadata in found]
        for verbatim in sorted({False, dataset.verbatim})
    ]
