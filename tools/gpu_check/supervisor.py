"""Items that are measured, each in a process of its own, and what becomes of them.

Processes, as many as there are cores and device memory, build and compile side by side. Timed sections come one at a time,
in the caller's order: the first item that is ready, and all others are stopped meanwhile. A process that crashes costs its
item; what the time did not suffice for has a row that says so.
"""

import argparse
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tools.harness.runs import last_line

ROOT = Path(__file__).resolve().parents[2]
MEASURED, PASSED, FAILED, OOM = "measured", "passed", "failed", "oom"
NOT_MEASURED = "not measured"
_PROCESSES = multiprocessing.get_context("spawn")

Values = dict[str, Any]  # by name, the unit in it; under "passed" a bool where the item is a check
Turn = Callable[
    [], None
]  # called by an item that has warmed up; returns when the device is its alone


Settings = argparse.Namespace
"""What every item is told: `flavors`; `tiny`, small sizes; `device`, "cuda" or "cpu"; `work`, a folder of its own"""


class NotMeasured(Exception):
    """The item cannot be measured here, and why."""


@dataclass
class Row:
    """What became of an item."""

    item: str
    status: str
    values: Values = field(default_factory=dict)
    why: str = ""  # of every status but measured and passed
    began: float = 0.0  # time.time() at which the timed section began; 0: it did not
    seconds: float = 0.0  # of the timed section

    def __str__(self) -> str:
        """The status, and some figures or why there are none."""
        plain = {k: v for k, v in self.values.items() if isinstance(v, (int, float, str))}
        shown = [f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in plain.items()]
        return ": ".join(filter(None, [self.status, self.why or ", ".join(shown[:8])]))


@dataclass(eq=False)
class Item:
    name: str
    measure: Callable[[Turn], Values]
    gib: float = 6.0  # of device memory that it holds at most
    row: Row | None = None
    process: BaseProcess | None = None
    pipe: Connection = field(init=False)
    is_ready: bool = False

    def start(self, log: Path) -> None:
        self.pipe, theirs = _PROCESSES.Pipe()
        given = self.name, self.measure, theirs, log
        self.process = _PROCESSES.Process(target=_measure, args=given, name=str(log))
        self.process.start()
        theirs.close()

    def listen(self) -> None:
        """Takes what the process says: that it is ready, or its row."""
        if self.process is None:
            return
        try:
            if not self.process.is_alive() and not self.pipe.poll():
                raise EOFError
            if self.pipe.poll():
                self.row, self.is_ready = self.pipe.recv(), True
        except (EOFError, OSError):
            self.process.join(5)
            status = f"its process ended with status {self.process.exitcode}"
            self.row = Row(self.name, FAILED, why=f"{status}: {last_line(Path(self.process.name))}")


@dataclass
class Supervisor:
    items: Sequence[Item]
    work: Path  # folder of their logs
    at_once: int  # processes that may be alive
    gib: float  # of device memory for all of them
    end: float  # time.time() at which the check is over
    keep: Callable[
        [], object
    ]  # after every row: a machine that is taken away takes one item with it

    def run(self) -> None:
        """Rows for all items."""
        measuring: Item | None = None
        try:
            while left := [item for item in self.items if item.row is None]:
                for item in left:
                    self._settle(item)
                left = [item for item in left if item.row is None]
                if begins := measuring is None or measuring.row is not None:
                    _send(left, signal.SIGCONT)
                    self._start_more(left)
                    measuring = next((item for item in left if item.is_ready), None)
                if measuring is not None:
                    _send([each for each in left if each is not measuring], signal.SIGSTOP)
                    if begins:
                        measuring.pipe.send(None)
                time.sleep(0.05)
        finally:
            _send(self.items, signal.SIGKILL)

    def _start_more(self, left: list[Item]) -> None:
        alive = [item for item in left if item.process is not None]
        for item in left:
            held = sum(each.gib for each in alive) + item.gib
            fits = not alive or (len(alive) < self.at_once and held <= self.gib)
            if item.process is None and fits:
                item.start(self.work / f"{self.items.index(item)}.log")
                alive.append(item)

    def _settle(self, item: Item) -> None:
        item.listen()
        left = self.end - time.time()
        if item.row is None and left < 0:
            why = "time: the check was over before its turn had ended"
            item.row = Row(item.name, NOT_MEASURED, why=why)
        if item.row is not None:
            done = sum(each.row is not None for each in self.items)
            said = f"{item.name}: {item.row} ({left:.0f} s left)"
            print(f"[{done}/{len(self.items)}] {said}", flush=True)
            self.keep()


def _send(items: Sequence[Item], number: int) -> None:
    """A signal to the processes of items and those that they started."""
    for item in items:
        if item.process is not None and item.process.is_alive():
            for send in (os.killpg, os.kill):  # it may not lead its group yet
                with suppress(ProcessLookupError):
                    send(item.process.ident or 0, number)


def _measure(name: str, measure: Callable[[Turn], Values], pipe: Connection, log: Path) -> None:
    """Run an item: it compiles while the others do, says that it is ready, and waits for its turn."""
    os.setsid()  # stopped and killed together with what it starts
    with log.open("wb") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    from torchtitan.models.dit_tts.errors import failure_state

    row = Row(name, MEASURED)

    def turn() -> None:
        pipe.send(None)
        pipe.recv()
        row.began = time.time()

    try:
        row.values = measure(turn)
        if "passed" in row.values:
            row.status = PASSED if row.values["passed"] else FAILED
            row.why = row.values.pop("why", "")
    except NotMeasured as error:
        row.status, row.why = NOT_MEASURED, str(error)
    except Exception as error:
        traceback.print_exc()
        row.status = OOM if failure_state(error) == "oom" else FAILED
        row.why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    row.seconds = time.time() - row.began if row.began else 0.0
    pipe.send(row)
