"""Signals that end a run between two steps, alike on all ranks, and which rank the others wait for.

The main thread, which alone runs handlers, may wait in a collective for minutes. So a thread reads the signals' numbers
from a pipe and counts them.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.infra.compat import get_default_store
from torchtitan.models.dit_tts.infra.ranks import with_host
from torchtitan.tools.logging import logger

PREEMPTED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""signals of schedulers; the others of `SIGNALS` come from people and terminals"""
SIGNALS = (*PREEMPTED, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SAME_SECONDS = 1.0
"""Within it the same signal counts once, as a launcher and a terminal may both send it"""
_SAY_SO_SECONDS = 3.0
"""Time for all ranks of a timed-out collective to report it"""


T = TypeVar("T")


class Stopped(Exception):
    """Work between two steps was left because of a signal."""


def state_after(number: int) -> str:
    return "preempted" if number in PREEMPTED else "interrupted"


class StopSignal:
    """Catches `SIGNALS` until `close`. Before `arm` a signal raises KeyboardInterrupt. Afterwards
    the first one is a request, on which the ranks agree at the end of a step, and a second one ends
    the process. `at_once`: called with the signal's number before a second signal ends the process.
    """

    def __init__(self, at_once: Callable[[int], None]):
        self._at_once = at_once
        self._number = 0
        self._armed = False
        self.group: dist.ProcessGroup | None = None
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        self._before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def arm(self, timeout: timedelta) -> None:
        """Called on every rank before the first step. `timeout`: maximum time of a step."""
        if dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._armed = True

    def agreed(self) -> int:
        """The number of a signal that any rank has got, the same on all; 0 if there is none. A collective."""
        if self.group is None:
            return self._number
        number = torch.tensor(self._number)
        dist.all_reduce(number, dist.ReduceOp.MAX, self.group)
        return int(number)

    def until_stopped(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items, of which every rank has as many. Raises Stopped before one once a rank has got a signal.
        A collective."""
        for each in items:
            if self.agreed():
                raise Stopped
            yield each

    def close(self) -> None:
        self._armed = False
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._before_fd)
        self._writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._armed:
            name = signal.Signals(number).name
            raise KeyboardInterrupt("" if number == signal.SIGINT else f"terminated by {name}")
        self._number = self._number or number

    def _watch(self) -> None:
        requested = False
        while data := self._reader.recv(1):
            number = data[0]
            if not self._armed or number not in SIGNALS:
                continue
            if requested:
                self._at_once(number)
                os._exit(128 + number)
            requested = True
            self._number = self._number or number
            logger.warning(
                f"{signal.Signals(number).name}: this step or batch ends, a checkpoint is saved, and the run ends; "
                f"another signal ends it at once"
            )
            # Numbers that have come by then are the same signal, even if a call that holds the GIL delayed us.
            time.sleep(_SAME_SECONDS)
            with suppress(BlockingIOError):
                self._reader.recv(1 << 16, socket.MSG_DONTWAIT)
        self._reader.close()


class Progress:
    """The step of each rank, in the store of the process group."""

    def __init__(self) -> None:
        self._store = get_default_store() if dist.get_world_size() > 1 else None

    def at(self, step: int, part: int) -> None:
        """Records that this rank is at `part` of `step`: 0 its start, 1 its batches are loaded."""
        if self._store is not None:
            self._store.set(f"progress/{dist.get_rank()}", f"{step} {part}")

    def behind(self) -> str:
        """A sentence that names the ranks for which the others wait; empty if they are not known. Called by
        each rank whose collective has timed out."""
        if self._store is None:
            return ""
        try:
            self._store.set_timeout(timedelta(seconds=5))
            self._store.set(f"timed out/{dist.get_rank()}", "")
            ranks = range(dist.get_world_size())
            found = {
                rank: tuple(map(int, self._store.get(f"progress/{rank}").split())) for rank in ranks
            }
            last = min(found.values())
            behind = [rank for rank in ranks if found[rank] == last]
            if len(behind) == len(ranks):  # all are at one part: a rank that does not report hangs
                time.sleep(_SAY_SO_SECONDS)
                behind = [rank for rank in ranks if not self._store.check([f"timed out/{rank}"])]
            named = ", ".join(map(with_host, behind))
        except RuntimeError:  # the process with the store has ended
            return ""
        where = "loading its batches" if last[1] == 0 else "in the model or a collective"
        return f"rank {named} stalls at step {last[0]}, {where}" if named else ""
