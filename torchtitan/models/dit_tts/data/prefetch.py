"""Micro-batches prefetched by threads, in order.

Not `torchdata.nodes` (Prefetcher over ParallelMapper): its nodes count what they have loaded and must
save that count, while here the loader's position, of batches handed out, is the whole state and may be
moved under a running iterator.
"""

import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader, MicroBatch


class MicroBatchIterator:
    """Hands out a loader's next micro-batch while its threads load the following ones."""

    def __init__(self, loader: "LatentDataLoader"):
        self._loader = loader
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[MicroBatch]]] = deque()

    def __iter__(self) -> "MicroBatchIterator":
        return self

    def __next__(self) -> "MicroBatch":
        loader = self._loader
        position = loader.consumed
        if loader.num_workers == 0:
            batch = loader.micro_batch(position)
        else:
            batch = self._take(position)
        loader.consumed = position + 1
        return batch

    def _take(self, position: int) -> "MicroBatch":
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._loader.num_workers, thread_name_prefix="data")
            # The pool's threads hold no reference to this iterator, so dropping it ends them.
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        # The loader was moved (a state was loaded, another iterator took batches): what was
        # prefetched is not what comes next.
        if self._ahead and self._ahead[0][0] != position:
            self._drop_ahead()
        # The one that is waited for now, and prefetch_batches after it.
        while len(self._ahead) <= self._loader.prefetch_batches:
            number = position + len(self._ahead)
            self._ahead.append((number, self._pool.submit(self._loader.micro_batch, number)))
        _, future = self._ahead.popleft()
        try:
            return future.result()
        except BaseException:
            self._drop_ahead()  # so that another try asks for the same batch again
            raise

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft()[1].cancel()
