"""Runs the stages one after another, each in a process of its own and within its time.

A stage that crashes costs the item it crashed at, and continues behind it in a new process; one that
does not end is killed. What was not reached has a row that says so.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_tts.launch.supervisor import kill_tree
from tools.gpu_check.items import AGAIN, FAILED, NOT_MEASURED, Row, read_stage, write_row
from tools.gpu_check.settings import ROOT, STAGES, Settings, Stage
from tools.harness.runs import last_line

_GRACE_SECONDS = 15.0
"""after its time a stage may finish the item it is at, for so long at most"""

_POLL_SECONDS = 0.2


@dataclass
class StageResult:
    name: str
    state: str
    """running; completed; timeout, where it was killed; failed, where it could not even list its items"""

    seconds: float = 0.0
    budget_seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def minutes(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


class Supervisor:
    """Args:
    settings: for every stage.
    budget_seconds: for all stages together.
    say: takes a line of progress.
    keep: takes the stages so far, after every row: a machine that is taken away takes one item with it.
    """

    def __init__(
        self,
        settings: Settings,
        budget_seconds: float,
        say: Callable[[str], None] = print,
        keep: Callable[[list[StageResult]], None] = lambda results: None,
    ):
        self.settings = settings
        self.keep = keep
        self.results: list[StageResult] = []
        self.end = time.time() + budget_seconds
        self.began = time.time()
        self.say = say

    def run(self, chosen: list[str]) -> list[StageResult]:
        stages = [stage for stage in STAGES if stage.name in chosen]
        for number, stage in enumerate(stages):
            # What earlier stages left is divided among all that are still to come.
            fractions = sum(later.fraction for later in stages[number:])
            budget = max(0.0, self.end - time.time()) * stage.fraction / fractions
            place = f"[{number + 1}/{len(stages)}] {stage.name}"
            self.say(
                f"{place}: {stage.summary}; {minutes(budget)} for it, {minutes(self.end - time.time())} "
                f"for all that is left"
            )
            self._run_stage(stage, budget, place)
        return self.results

    def _run_stage(self, stage: Stage, budget: float, place: str) -> None:
        began = time.time()
        result = StageResult(stage.name, "running", budget_seconds=budget)
        self.results.append(result)
        state = "completed"
        lines = self.settings.folder / f"{stage.name}.jsonl"
        log = self.settings.folder / f"{stage.name}.log"
        deadline = began + budget
        reported = 0
        while True:
            process = self._start(stage, lines, log, deadline)
            try:
                while process.poll() is None and time.time() < deadline + _GRACE_SECONDS:
                    time.sleep(_POLL_SECONDS)
                    reported = self._report(place, lines, reported, began, deadline, result)
                timed_out = process.poll() is None
            finally:
                kill_tree(process)
            names, rows = read_stage(lines)
            if names is None:
                state = "timeout" if timed_out else "failed"
                why = (
                    f"the stage's {budget:.0f} s were over before its first item"
                    if timed_out
                    else f"the stage's process ended with status {process.returncode}: {last_line(log)}"
                )
                write_row(lines, Row("start", NOT_MEASURED if timed_out else FAILED, why=why))
                break
            missing = [name for name in names if name not in {row.item for row in rows}]
            if not missing:
                break
            if timed_out:
                state = "timeout"
                why = f"time: the stage's {budget:.0f} s and {_GRACE_SECONDS:.0f} s of grace were over"
                for name in missing:
                    write_row(lines, Row(name, NOT_MEASURED, why=why))
                break
            if process.returncode != AGAIN:
                why = f"its process ended with status {process.returncode}: {last_line(log)}"
                write_row(lines, Row(missing[0], FAILED, why=why))
        result.state = state
        self._report(place, lines, reported, began, deadline, result)
        self.keep(self.results)

    def _start(self, stage: Stage, lines: Path, log: Path, deadline: float) -> subprocess.Popen:
        settings_file = self.settings.folder / f"{stage.name}.settings.json"
        self.settings.write(settings_file, deadline)
        environment = {
            **os.environ,
            **({"CUDA_VISIBLE_DEVICES": ""} if self.settings.device == "cpu" else {}),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            # Stages compile the same blocks; the later ones find the kernels.
            "TORCHINDUCTOR_CACHE_DIR": str(self.settings.folder / "inductor"),
        }
        command = [sys.executable, "-m", "tools.gpu_check.stage", stage.name]
        with open(log, "ab") as output:
            return subprocess.Popen(
                [*command, str(settings_file), str(lines)],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # killed together with the runs it starts
            )

    def _report(
        self,
        place: str,
        lines: Path,
        reported: int,
        began: float,
        deadline: float,
        result: StageResult,
    ) -> int:
        """Prints and keeps the rows that came in after the first `reported`; returns how many there are now."""
        names, rows = read_stage(lines)
        result.rows, result.seconds = rows, time.time() - began
        for number, row in enumerate(rows[reported:], start=reported + 1):
            left = max(0.0, deadline - time.time())
            if names:
                spent = (time.time() - began) / number
                left = min(left, spent * (len(names) - number))
            later = max(0.0, self.end - deadline)
            self.say(
                f"{place} {number}/{len(names or rows)} {row.item}: {describe(row)} "
                f"({minutes(time.time() - self.began)} gone, at most {minutes(left + later)} to go)"
            )
        if len(rows) > reported:
            self.keep(self.results)
        return len(rows)


def describe(row: Row) -> str:
    """A row in words: its status, and its figures or why it has none."""
    figures = ", ".join(
        f"{name} {short(value)}" for name, value in row.values.items() if _plain(value)
    )
    return ": ".join(filter(None, [row.status, row.why or figures]))


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float, str))


def short(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
