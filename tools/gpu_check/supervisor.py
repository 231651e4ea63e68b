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
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.gpu_check.items import FAILED, NOT_MEASURED, ROOT, Item, Row, Settings
from tools.harness.runs import last_line

_POLL_SECONDS = 0.05


@dataclass
class Entry:
    """An item, its process and its row."""

    item: Item
    place: Path
    """its files without their suffixes, named by its number"""

    process: subprocess.Popen | None = None
    row: Row | None = None

    def start(self, settings: Settings) -> None:
        cache = Path(settings.work, "inductor")
        found = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        variables = {"PYTHONPATH": os.pathsep.join(found), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        variables["TRITON_CACHE_DIR"] = str(cache / "triton")
        if settings.tiny:
            variables["TRITON_INTERPRET"] = (
                "1"  # our own kernels; the compiler's for a CPU are not Triton's
            )
        given = [json.dumps(asdict(settings)), self.place.name]
        with self.place.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.gpu_check.worker", *given],
                cwd=ROOT,
                env=os.environ | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # stopped and killed together with what it starts
            )

    def send(self, number: int) -> None:
        """A signal to the process and those that it started."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def ended(self) -> Row | None:
        """The row of a process that has ended."""
        if self.process is None or self.process.poll() is None:
            return None
        with suppress(FileNotFoundError):
            return Row(**json.loads(self.place.with_suffix(".json").read_text()))
        said = last_line(self.place.with_suffix(".log"))
        why = f"its process ended with status {self.process.returncode}: {said}"
        return Row(self.item.name, FAILED, why=why)


class Supervisor:
    """Args:
    at_once: processes that may be alive.
    gib: device memory for all of them.
    end: time.time() at which the check is over.
    keep: called after every row: a machine that is taken away takes one item with it.
    """

    def __init__(
        self,
        settings: Settings,
        items: list[Item],
        at_once: int,
        gib: float,
        end: float,
        keep: Callable[[], object],
    ):
        self.settings, self.at_once, self.gib, self.end = settings, at_once, gib, end
        self.keep, self.began = keep, time.time()
        rows = Path(settings.work, "rows")
        rows.mkdir()
        self.entries = [Entry(item, rows / str(number)) for number, item in enumerate(items)]

    def run(self) -> None:
        """Rows for all entries."""
        measuring: Entry | None = None
        try:
            while left := [entry for entry in self.entries if entry.row is None]:
                over = time.time() > self.end
                for entry in left:
                    why = "time: the check was over before its turn had ended"
                    late = Row(entry.item.name, NOT_MEASURED, why=why) if over else None
                    if row := late or entry.ended():
                        self._finish(entry, row)
                self._start_more([entry for entry in left if entry.row is None])
                if measuring is None or measuring.row is not None:
                    _send(left, signal.SIGCONT)
                    measuring = next((entry for entry in left if _is_ready(entry)), None)
                    if measuring is not None:
                        _send([each for each in left if each is not measuring], signal.SIGSTOP)
                        measuring.place.with_suffix(".turn").touch()
                time.sleep(_POLL_SECONDS)
        finally:
            _send(self.entries, signal.SIGKILL)

    def _start_more(self, left: list[Entry]) -> None:
        alive = [entry for entry in left if entry.process is not None]
        for entry in left:
            held = sum(each.item.gib for each in alive) + entry.item.gib
            fits = not alive or (len(alive) < self.at_once and held <= self.gib)
            if entry.process is None and fits:
                entry.start(self.settings)
                alive.append(entry)

    def _finish(self, entry: Entry, row: Row) -> None:
        entry.row = row
        done = sum(each.row is not None for each in self.entries)
        gone = f"{time.time() - self.began:.0f} of {self.end - self.began:.0f} s gone"
        print(f"[{done}/{len(self.entries)}] {row.item}: {row} ({gone})", flush=True)
        self.keep()


def _is_ready(entry: Entry) -> bool:
    return entry.row is None and entry.place.with_suffix(".ready").exists()


def _send(entries: list[Entry], number: int) -> None:
    for entry in entries:
        entry.send(number)
