"""Corrupt samples that a run meets while it reads: counted, reported once per shard, refused when too many.

`GlobalBatchSampler.replacement` gives the sample that replaces one, so that every rank, number of threads and resume
sees the same batches as long as the same samples are corrupt.
"""

import threading
from collections.abc import Sequence
from typing import Any

from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.tools.logging import logger

# The fraction is taken of at least so many reads, or all samples where there are fewer: one corrupt
# sample among the first ten says little.
_MIN_READS = 1000


class CorruptSampleCounter:
    """Counts one process's corrupt samples. Thread-safe. `reads`: rows filled so far."""

    def __init__(self, on_error: str = "raise", max_corrupt_fraction: float = 0.01):
        self.on_error = on_error
        self.max_corrupt_fraction = max_corrupt_fraction
        self.reads = 0
        self._corrupt: set[int] = set()
        self._reported: set[int] = set()
        self._lock = threading.Lock()

    def skip(self, dataset: Dataset, sample: int, error: CorruptSampleError) -> None:
        """Count a corrupt sample, once however often it comes, or raise its error."""
        if self.on_error == "raise":
            raise error
        with self._lock:
            self._corrupt.add(sample)
            shard = int(dataset.shard[sample])
            if shard not in self._reported:
                self._reported.add(shard)
                logger.warning(
                    f"{error}. Another sample replaces it, or none in packed batches; further ones of this shard are counted"
                )
            found, total = len(self._corrupt), len(dataset)
            # Later passes read the same samples again: they make no fraction smaller.
            judged = min(max(self.reads, _MIN_READS), total)
            left_out = dataset.corrupt_samples / (dataset.corrupt_samples + total)
            if found / judged + left_out > self.max_corrupt_fraction:
                raise InputError(
                    f"{found} corrupt samples among {judged} of this process, in addition to {left_out:.1%} left out at the start, "
                    f"are more than [data] max_corrupt_fraction = {self.max_corrupt_fraction:g}; the last: {error}"
                )


def read_metadata(dataset: Dataset, samples: Sequence[int]) -> list[dict[str, Any] | None]:
    """The JSON objects of some samples, read at once; None for a corrupt one."""
    try:
        return list(dataset.metadata_of(samples))
    except CorruptSampleError:
        if len(samples) == 1:
            return [None]
        return [found for sample in samples for found in read_metadata(dataset, [sample])]
