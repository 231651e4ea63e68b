"""Damaged samples that a run meets while it reads: counted, told once a file, too many are the end.

What stands for a damaged sample is ``GlobalBatchSampler.replacement``, so that every rank, number of threads
and resume sees the same batches as long as the same samples are damaged.
"""

import threading

from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.tools.logging import logger

# A share is judged over at least so many reads, or all samples where there are fewer: one damaged
# sample among the first ten says little.
_FEWEST_READS = 1000


class CorruptSampleCounter:
    """Counts one process's damaged samples. Thread-safe.

    Attributes:
        on_error: "raise" or "skip".
        reads: rows filled so far; a lost update between threads does no harm.
    """

    def __init__(self, on_error: str = "raise", max_corrupt_fraction: float = 0.01):
        self.on_error = on_error
        self.max_corrupt_fraction = max_corrupt_fraction
        self.reads = 0
        self._damaged: set[int] = set()
        self._told: set[int] = set()
        self._lock = threading.Lock()

    def count(self, dataset: Dataset, sample: int, error: CorruptSampleError) -> None:
        """Take note of a damaged sample; a sample that comes again counts once.

        Raises:
            InputError: there are too many by now.
        """
        with self._lock:
            self._damaged.add(sample)
            shard = int(dataset.shard[sample])
            if shard not in self._told:
                self._told.add(shard)
                logger.warning(
                    f"{error} Another sample takes its place; further ones of this shard are "
                    "counted without a word."
                )
            found, total = len(self._damaged), len(dataset)
            # Later passes read the same samples again: they make no share smaller.
            judged = min(max(self.reads, _FEWEST_READS), total)
            left_out = dataset.damaged_samples / (dataset.damaged_samples + total)
            if found / judged + left_out > self.max_corrupt_fraction:
                raise InputError(
                    f"{found} damaged samples among the {judged} that this process has read or is "
                    f"judged by, beside {left_out:.1%} that were left out at the start, are more than "
                    f"data.max_corrupt_fraction = {self.max_corrupt_fraction:g}; the last: {error}"
                )
