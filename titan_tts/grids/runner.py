"""Runs a cell of a grid and keeps its outcome in `run.json`."""

import json
import shutil
from pathlib import Path
from typing import Any

import tomli_w
from torchtitan.tools import utils

from titan_tts.grids.cells import Cell
from titan_tts.grids.grid_file import AUTO
from titan_tts.launch.supervisor import Outcome, RunProcess, train_command
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.config.manager import without_none
from torchtitan.models.dit_tts.errors import InputError, require, without_secrets
from torchtitan.models.dit_tts.files import fingerprint, held, write_atomic
from torchtitan.models.dit_tts.run.run_folder import LOCK

FILE_NAME = "run.json"

_NOT_COMPARED = ("config_file", "dump_folder", "experiment", "description")
"""of [job]"""

FINAL = ("completed", "oom", "failed", "timeout", "skipped")
"""States of a run that is not run again when a grid continues"""

# Each trial of a search is a run of its own in benchmark mode: the allocator starts empty, as in training,
# and where one rank runs out of memory the launcher ends the others, so none hangs. CUDA graphs are recorded
# in the third step.
TRIAL_SETTINGS = {"benchmark.steps": 1, "benchmark.warmup_steps": 3}

GRACE_SECONDS = 20.0
"""for a run to end by itself, after it has completed or after SIGTERM"""


class TrialError(InputError):
    """A trial has ended for another reason than memory, with this outcome."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.reason)
        self.outcome = outcome


class Runner:
    """Runs of the grid of this name, each ended after so many seconds."""

    lock_seconds = 2 * GRACE_SECONDS
    """within which a run of an earlier start must have ended"""

    def __init__(self, grid: str, timeout_seconds: float):
        self.grid = grid
        self.timeout_seconds = timeout_seconds

    def record(self, cell: Cell) -> dict[str, Any]:
        """The run.json of a cell, empty where there is none."""
        record = read_json(cell.folder / FILE_NAME)
        if record.get("identity") == _identity(cell):
            return record
        # A start killed in its first write has left the folder, and perhaps a temporary file.
        if record or any(path.name[0] != "." for path in cell.folder.glob("*")):
            raise InputError(
                f"{cell.folder} belongs to another run or to other settings; give the grid another name, or "
                f"remove that folder"
            )
        return {}

    def run(self, cell: Cell, forecast: dict[str, Any] | None) -> dict[str, Any]:
        """Runs a cell and returns its record. An interrupt ends the run, which is then run again."""
        folder = cell.folder
        if self.record(cell):  # of a start that was interrupted; its benchmark cannot be continued
            refusal = f"{folder}: a process of an earlier start still runs in it; end it and repeat the command"
            with held(folder / LOCK, refusal, self.lock_seconds):
                # The record stays, and says whose folder it is should this start be killed, too.
                for path in folder.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path)
                    elif path.name not in (FILE_NAME, LOCK):
                        path.unlink()
        self.keep(cell, Outcome("running", "", 0.0), forecast)
        config = folder / "config.toml"
        write_atomic(config, tomli_w.dumps(without_secrets(without_none(cell.content))))
        command = train_command(config, cell.gpus, nodes=cell.nodes)
        run = RunProcess(command, folder, folder / "run.log")
        try:
            ended = run.wait(self.timeout_seconds, until=run.completed)
        except BaseException:
            run.end(GRACE_SECONDS)
            interrupted = Outcome("preempted", "the grid was ended", run.outcome().seconds)
            self.keep(cell, interrupted, forecast)
            raise
        run.end(GRACE_SECONDS)
        outcome = run.outcome()
        if not ended:
            late = f"not completed in {self.timeout_seconds / 60:g} minutes ({outcome.reason})"
            outcome = Outcome("timeout", late, outcome.seconds)
        return self.keep(cell, outcome, forecast)

    def run_succeeds(self, cell: Cell) -> bool:
        """True if a trial completes, and does not run out of memory; raises TrialError where it ends
        otherwise. One that was made before is not made again."""
        require(not cell.refused, cell.refused)
        record = self.record(cell)
        if record.get("state") not in ("completed", "oom"):
            record = self.run(cell, None)
        state, tried = record["state"], f"batch {cell.batch}"
        print(f"  {tried}: {state} ({record['seconds']:.0f} s)", flush=True)
        if state not in ("completed", "oom"):
            why = f"{record['reason']}; see {cell.folder}"
            why = f"the trial of {tried} ended with {state}: {why}"
            raise TrialError(Outcome(state, why, 0.0))
        return state == "completed"

    def keep(self, cell: Cell, outcome: Outcome, forecast: dict[str, Any] | None) -> dict[str, Any]:
        """Writes a cell's outcome and returns its record."""
        record = {
            "name": cell.name,
            "grid": self.grid,
            "factors": cell.factors,
            "repeat": cell.repeat,
            "identity": _identity(cell),
            "state": outcome.state,
            "reason": outcome.reason,
            "seconds": outcome.seconds,
            "forecast": forecast,
        }
        write_atomic(cell.folder / FILE_NAME, json.dumps(record, indent=1) + "\n")
        return record


def _identity(cell: Cell) -> str:
    """The same for starts of the same run (config, device, GPUs), also where its batch is searched anew."""
    content = {section: dict(keys) for section, keys in cell.content.items()}
    for key in _NOT_COMPARED:
        del content["job"][key]
    if cell.axes.get("batch") == AUTO:
        for key in ("local_batch_size", "global_batch_size"):
            del content["training"][key]
    machine = [utils.device_module.get_device_name(), cell.gpus]
    return fingerprint(json.dumps([content, cell.axes, *machine], default=str))


def figures(folder: Path) -> str:
    """The main figures of a run's benchmark.json, for a line of progress."""
    report = read_json(folder / "benchmark.json")
    if not report:
        return ""
    shown = [f"{report['samples_per_second']:.2f} samples/s"]
    if report.get("mfu") is not None:
        shown.append(f"{report['mfu']:.1%} MFU")
    shown.append(f"{report['peak_reserved_gib']:.2f} GiB")
    return ", ".join(shown)
