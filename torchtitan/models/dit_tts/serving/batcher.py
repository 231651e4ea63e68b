"""Utterances of several requests, said together: one thread has the model, and takes what waits as one batch."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.inference.synthesizer import Speech, Synthesizer, Utterance


class QueueFull(InputError):
    """As many utterances wait as may."""


class Batcher:
    """Says utterances in the order in which they came.

    Args:
        max_batch: utterances that are said together.
        window_seconds: how long the first of a batch waits for others.
        max_waiting: utterances that may wait.
        seed: of the noise.
    """

    def __init__(
        self,
        synthesizer: Synthesizer,
        max_batch: int = 16,
        window_seconds: float = 0.02,
        max_waiting: int = 64,
        seed: int = 0,
    ):
        self.synthesizer = synthesizer
        self.max_batch, self.window_seconds = max_batch, window_seconds
        self.max_waiting, self.seed = max_waiting, seed
        self._waiting: deque[tuple[Utterance, Future[Speech]]] = deque()
        self._changed = threading.Condition()
        self._closed = self._failing = False
        self._thread = threading.Thread(target=self._work, name="synthesizer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Utterances that wait."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the thread is there, and nothing has failed for another reason than what was asked for since
        something was last said."""
        return self._thread.is_alive() and not self._failing

    def submit(self, utterances: Sequence[Utterance], begun: bool = False) -> list[Future[Speech]]:
        """All of them or none; a future that is cancelled before its turn is not said.

        Args:
            begun: they end what was begun, and are taken however many wait.

        Raises:
            QueueFull: they would be too many.
        """
        with self._changed:
            if not begun and len(self._waiting) + len(utterances) > self.max_waiting:
                raise QueueFull(f"{len(self._waiting)} texts wait already; try again later")
            pairs: list[tuple[Utterance, Future[Speech]]] = [
                (each, Future()) for each in utterances
            ]
            self._waiting += pairs
            self._changed.notify_all()
        return [future for _, future in pairs]

    def close(self) -> None:
        """Ends after the batch that is being said; what still waits is cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for _, future in self._waiting:
            future.cancel()

    def _work(self) -> None:
        while batch := self._next_batch():
            self._say(batch)

    def _next_batch(self) -> list[tuple[Utterance, Future[Speech]]]:
        """What is to be said together; empty once the batcher is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                until = time.monotonic() + self.window_seconds
                while not self._closed and len(self._waiting) < self.max_batch:
                    if not self._changed.wait(until - time.monotonic()):
                        break
                if self._closed:
                    return []
                taken = [self._waiting.popleft() for _ in range(min(self.max_batch, self.waiting))]
                batch = [pair for pair in taken if pair[1].set_running_or_notify_cancel()]
                if batch:
                    return batch

    def _say(self, batch: list[tuple[Utterance, Future[Speech]]]) -> None:
        try:
            spoken = self.synthesizer.synthesize([each for each, _ in batch], seed=self.seed)
        except Exception as error:  # whatever it is, the one who asked must hear of it
            if len(batch) == 1:
                self._failing = self._failing or not isinstance(error, InputError)
                batch[0][1].set_exception(error)
            else:  # another's text must not spoil it
                for pair in batch:
                    self._say([pair])
            return
        self._failing = False
        for (_, future), speech in zip(batch, spoken, strict=True):
            future.set_result(speech)
