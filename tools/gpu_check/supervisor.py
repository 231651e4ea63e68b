"""Starts a process per item, so many at once as there are cores and device memory, and gives them their turns.

Processes build and compile side by side from the first second. Timed sections come one at a time, in the caller's
order: the first item that is ready, and while it measures all others are stopped, so that device and cores are its own.
A process that crashes costs its item; what the time did not suffice for has a row that says so.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.gpu_check.items import FAILED, NOT_MEASURED, Row, described, read_row
from tools.gpu_check.settings import ROOT, Settings
from tools.harness.runs import last_line

_POLL_SECONDS = 0.05


@dataclass
class Entry:
    """An item, its process and its row."""

    number: int
    group: str
    name: str
    gib: float
    process: subprocess.Popen | None = None
    row: Row | None = None

    def send(self, number: int) -> None:
        """A signal to the process and those that it started."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Supervisor:
    """Args:
    at_once: processes that may be alive.
    gib: device memory for all of them.
    end: time.time() at which the check is over.
    say: takes a line of progress.
    keep: takes the entries after every row: a machine that is taken away takes one item with it.
    """

    def __init__(
        self,
        settings: Settings,
        at_once: int,
        gib: float,
        end: float,
        say: Callable[[str], None] = print,
        keep: Callable[[list[Entry]], None] = lambda entries: None,
    ):
        self.settings, self.at_once, self.gib, self.end = settings, at_once, gib, end
        self.say, self.keep = say, keep
        self.rows = settings.folder / "rows"
        self.rows.mkdir(parents=True, exist_ok=True)
        self.file = settings.write()
        self.began = time.time()
        self.entries: list[Entry] = []

    def run(self) -> list[Entry]:
        """Rows for all items.

        Raises:
            RuntimeError: the items could not even be listed.
        """
        listing = self._start("list")
        if listing.wait():
            raise RuntimeError(last_line(self.rows / "list.log"))
        listed = json.loads((self.rows / "list.json").read_text())
        self.entries = [Entry(number, *each) for number, each in enumerate(listed)]
        measuring: Entry | None = None
        try:
            while left := [entry for entry in self.entries if entry.row is None]:
                if time.time() > self.end:
                    for entry in left:
                        why = "time: the check was over before its turn had ended"
                        self._finish(entry, Row(entry.name, NOT_MEASURED, why=why))
                    break
                self._start_more(left)
                for entry in left:
                    self._collect(entry)
                if measuring is None or measuring.row is not None:
                    if measuring is not None:
                        self._others(left, measuring, signal.SIGCONT)
                    measuring = self._next(left)
                    if measuring is not None:
                        self._others(left, measuring, signal.SIGSTOP)
                        (self.rows / f"{measuring.number}.turn").touch()
                time.sleep(_POLL_SECONDS)
        finally:
            for entry in self.entries:
                entry.send(signal.SIGKILL)
        return self.entries

    def _start(self, number: int | str) -> subprocess.Popen:
        cache = self.settings.folder / "inductor"
        environment = {
            **os.environ,
            **({"CUDA_VISIBLE_DEVICES": ""} if self.settings.device == "cpu" else {}),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        command = [sys.executable, "-m", "tools.gpu_check.worker", str(self.file), str(number)]
        with (self.rows / f"{number}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # stopped and killed together with what it starts
            )

    def _start_more(self, left: list[Entry]) -> None:
        alive = [entry for entry in left if entry.process is not None]
        for entry in left:
            held = sum(each.gib for each in alive)
            if len(alive) >= self.at_once:
                return
            if entry.process is None and (not alive or held + entry.gib <= self.gib):
                entry.process = self._start(entry.number)
                alive.append(entry)

    def _collect(self, entry: Entry) -> None:
        if entry.process is None or entry.process.poll() is None:
            return
        why = f"its process ended with status {entry.process.returncode}: " + last_line(
            self.rows / f"{entry.number}.log"
        )
        row = read_row(self.rows / f"{entry.number}.json")
        self._finish(entry, row or Row(entry.name, FAILED, why=why))

    def _finish(self, entry: Entry, row: Row) -> None:
        entry.row = row
        done = sum(each.row is not None for each in self.entries)
        gone, left = time.time() - self.began, max(0.0, self.end - time.time())
        self.say(
            f"[{done}/{len(self.entries)}] {row.item}: {described(row)} "
            f"({gone:.0f} s gone, at most {left:.0f} s to go)"
        )
        self.keep(self.entries)

    def _next(self, left: list[Entry]) -> Entry | None:
        ready = (e for e in left if e.row is None and (self.rows / f"{e.number}.ready").exists())
        return next(ready, None)

    @staticmethod
    def _others(left: list[Entry], measuring: Entry, number: int) -> None:
        for entry in left:
            if entry is not measuring:
                entry.send(number)


def stages(entries: list[Entry]) -> list[dict]:
    """Rows by group, as the file of results has them."""
    groups = dict.fromkeys(entry.group for entry in entries)
    return [
        {
            "name": group,
            "rows": [vars(e.row) for e in entries if e.group == group and e.row is not None],
        }
        for group in groups
    ]


def clean(folder: Path) -> None:
    """Removes what an earlier check left in the same folder, but for compiled kernels."""
    for path in (folder / "rows").glob("*"):
        path.unlink()
