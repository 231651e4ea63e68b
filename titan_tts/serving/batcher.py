"""Utterances of several requests, said together: one thread has the model, and takes what waits as one batch."""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice

from titan_tts.html import counted
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Speech, Utterance
from torchtitan.models.dit_tts.errors import InputError


class QueueFull(InputError):
    """As many utterances are asked for as may be."""


class Closed(InputError):
    """Nothing is said any more."""


_Pair = tuple[Utterance, Future[Speech]]


class Batcher:
    """Says utterances: the clients take turns, and those of one are said in the order in which they came.

    Args:
        max_batch: utterances that are said together.
        window_seconds: how long the first of a batch waits for others.
        max_waiting: utterances that a client may have asked for, and clients at a time.
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
        self._waiting: dict[str, deque[_Pair]] = {}  # by client; the first has the next turn
        self._asked = Counter[str]()
        self._changed = threading.Condition()
        self._closed = self._failing = False
        self._thread = threading.Thread(target=self._work, name="synthesizer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Utterances that wait."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    @property
    def alive(self) -> bool:
        """Whether the thread is there, and nothing has failed for another reason than what was asked for since
        something was last said."""
        return self._thread.is_alive() and not self._failing

    @contextmanager
    def admitted(self, client: str, utterances: int) -> Iterator[None]:
        """While a client's request of so many utterances is answered. One alone may have any number.

        Raises:
            QueueFull: with those of its other requests they would be too many.
        """
        with self._changed:
            others = self._asked[client]
            if others and others + utterances > self.max_waiting:
                raise QueueFull(
                    f"{counted(others, 'piece')} of your texts still to be said; try again later"
                )
            if not others and len(self._asked) >= self.max_waiting:
                raise QueueFull(
                    f"{counted(len(self._asked), 'client')} still to be served; try again later"
                )
            self._asked[client] += utterances
        try:
            yield
        finally:
            with self._changed:
                self._asked[client] -= utterances
                self._asked = +self._asked

    def submit(self, utterances: Sequence[Utterance], client: str = "") -> list[Future[Speech]]:
        """Futures of their speech; one that is cancelled before its turn is not said.

        Raises:
            Closed: there is nobody to say them.
        """
        with self._changed:
            if self._closed or not self._thread.is_alive():
                raise Closed("the server is ending")
            pairs: list[_Pair] = [(each, Future()) for each in utterances]
            if pairs:
                self._waiting.setdefault(client, deque()).extend(pairs)
                self._changed.notify_all()
        return [future for _, future in pairs]

    def close(self) -> None:
        """Ends after the batch that is being said; what still waits is cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for queue in self._waiting.values():
            for _, future in queue:
                future.cancel()

    def _work(self) -> None:
        while batch := self._next_batch():
            self._say(batch)

    def _next_batch(self) -> list[_Pair]:
        """What is to be said together; empty once the batcher is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                until = time.monotonic() + self.window_seconds
                while not self._closed and self.waiting < self.max_batch:
                    if not self._changed.wait(until - time.monotonic()):
                        break
                if self._closed:
                    return []
                if batch := list(islice(self._turns(), self.max_batch)):
                    return batch

    def _turns(self) -> Iterator[_Pair]:
        """Takes what waits: one of each client in turn, without those that were cancelled."""
        while self._waiting:
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            pair = queue.popleft()
            while not (wanted := pair[1].set_running_or_notify_cancel()) and queue:
                pair = queue.popleft()
            if queue:
                self._waiting[client] = queue  # as the last
            if wanted:
                yield pair

    def _say(self, batch: list[_Pair]) -> None:
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
