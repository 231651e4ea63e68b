"""Synthesizes the utterances of several requests together: one thread owns the model and batches the queue."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from titan_tts.report.words import counted
from titan_tts.serving.refusals import Refusal
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Speech, Utterance
from torchtitan.models.dit_tts.errors import InputError


def ending() -> Refusal:
    """The answer to requests once the batcher has ended."""
    return Refusal(503, "the server is shutting down", "ending")


_Pair = tuple[Utterance, Future[Speech]]


class Batcher:
    """Synthesizes utterances in the order in which they are asked for.

    Args:
        max_waiting: limit of the utterances of all requests that wait or are synthesized.
        max_unread: limit of those that are finished and that clients have yet to read: about 3 MB each at most.
        seed: of the noise.
    """

    def __init__(
        self,
        synthesizer: Synthesizer,
        max_batch: int = 16,
        max_waiting: int = 64,
        seed: int = 0,
        max_unread: int = 512,
    ):
        self.synthesizer = synthesizer
        self.max_batch, self.max_waiting, self.seed = max_batch, max_waiting, seed
        self.max_unread = max_unread
        self._queue = deque[_Pair]()
        self._admitted = self._unread = 0
        self._changed = threading.Condition()
        self._closed = self._failing = False
        self._thread = threading.Thread(target=self._work, name="synthesizer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of utterances in the queue."""
        return len(self._queue)

    @property
    def alive(self) -> bool:
        """True if the thread runs, and since the last speech nothing failed but mistakes of requests."""
        return self._thread.is_alive() and not self._failing

    @contextmanager
    def admitted(self, utterances: int) -> Iterator[None]:
        """Counts a request while it is answered. The only request may have any number of utterances; Refusal if
        several have too many."""
        with self._changed:
            full = self._admitted and self._admitted + utterances > self.max_waiting
            if full or self._unread >= self.max_unread:
                held = counted(self._admitted + self._unread, "piece")
                message = f"the queue holds {held} of texts; try again later"
                raise Refusal(429, message, "queue_full", headers={"Retry-After": "1"})
            self._admitted += utterances
        try:
            yield
        finally:
            with self._changed:
                self._admitted -= utterances

    @contextmanager
    def read(self, utterances: int, unread: int) -> Iterator[None]:
        """Counts, while the client of an admitted request is sent to, its `unread` finished utterances alone: others need
        not wait for one that plays what it reads."""
        with self._changed:
            self._admitted -= utterances
            self._unread += unread
        try:
            yield
        finally:
            with self._changed:
                self._admitted += utterances
                self._unread -= unread

    def submit(self, utterances: Sequence[Utterance]) -> list[Future[Speech]]:
        """Queues utterances. Returns futures of their speech, which may be cancelled before their turn."""
        pairs: list[_Pair] = [(each, Future()) for each in utterances]
        with self._changed:
            if self._closed or not self._thread.is_alive():
                raise ending()
            self._queue.extend(pairs)
            self._changed.notify_all()
        return [future for _, future in pairs]

    def close(self) -> None:
        """Ends after the present batch, and cancels the rest of the queue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for _, future in self._queue:
            future.cancel()

    def _work(self) -> None:
        while batch := self._next_batch():
            self._synthesize(batch)

    def _next_batch(self) -> list[_Pair]:
        """Waits for a batch without cancelled utterances; empty once the batcher is closed."""
        batch: list[_Pair] = []
        with self._changed:
            while not batch:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    return []
                while self._queue and len(batch) < self.max_batch:
                    pair = self._queue.popleft()
                    if pair[1].set_running_or_notify_cancel():
                        batch.append(pair)
        return batch

    def _synthesize(self, batch: list[_Pair]) -> None:
        try:
            spoken = self.synthesizer.synthesize([each for each, _ in batch], seed=self.seed)
        except Exception as error:  # whatever it is, the client must be told
            if len(batch) == 1:
                self._failing = self._failing or not isinstance(error, InputError)
                batch[0][1].set_exception(error)
            else:  # one client's text must not fail the others
                for pair in batch:
                    self._synthesize([pair])
            return
        self._failing = False
        for (_, future), speech in zip(batch, spoken, strict=True):
            future.set_result(speech)
