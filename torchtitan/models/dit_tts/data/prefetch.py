"""Load numbered items ahead of their use, by threads, in order. The position of the items handed out is the complete
state, kept by the caller, which `torchdata.nodes` cannot do."""

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadPrefetcher(Generic[T]):
    """Hands out an item while `num_workers` threads load the following ones, `prefetch` beyond it. `load`: the item at a
    position; without threads it is called when one is asked for."""

    def __init__(self, load: Callable[[int], T], num_workers: int, prefetch: int):
        self._load = load
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[T]]] = deque()

    def take(self, position: int) -> T:
        """The item at `position`; cheap where it is the one after the last that was taken."""
        if self._num_workers == 0:
            return self._load(position)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="data")
            # The pool's threads hold no reference to this object, so dropping it ends them.
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        if self._ahead and self._ahead[0][0] != position:
            self._drop_ahead()
        while len(self._ahead) <= self._prefetch:
            number = position + len(self._ahead)
            self._ahead.append((number, self._pool.submit(self._load, number)))
        _, future = self._ahead.popleft()
        try:
            return future.result()
        except BaseException:
            self._drop_ahead()  # unused loads would hold up the end of the process
            raise

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft()[1].cancel()
