"""Runs what is left of a grid, by growing batch, and keeps the outcome of each run in its `run.json`; larger batches are
skipped after an OOM."""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_tts.grids.cells import Cell, Cells
from titan_tts.grids.grid_file import AUTO, GridFile
from titan_tts.launch.supervisor import Outcome, RunProcess, train_command
from titan_tts.plan.devices import Cluster, check_device, device_of, find_device
from titan_tts.plan.forecast import Planner, largest_that_fits
from titan_tts.plan.parameters import Model
from titan_tts.report.words import counted
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.config.manager import without_none
from torchtitan.models.dit_tts.errors import InputError, require, without_secrets
from torchtitan.models.dit_tts.files import fingerprint, held, local_path, write_atomic
from torchtitan.models.dit_tts.metrics import eta
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

_START_SECONDS = 90.0
"""assumed: from a run's start to its first compiled step"""

_FIRST_BATCH = 8
"""with which a search begins where the plan knows nothing of the device"""

_OF_THE_MODEL = ("model", "encoder", "data", "lora", "distill")
"""Sections that decide about the model, but for `_OF_BATCHES`"""

_OF_BATCHES = ("batch_multiple", "bucket_frames", "num_buckets")


class TrialError(InputError):
    """A trial has ended for another reason than memory, with this outcome."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.reason)
        self.outcome = outcome


class GridRun:
    """A grid that is run or continued; runs in `retried` states are run again."""

    lock_seconds = 2 * GRACE_SECONDS
    """within which a run of an earlier start must have ended"""

    def __init__(self, grid: GridFile, retried: set[str], run_what_cannot_fit: bool = False):
        options = grid.grid
        self.folder = Path(local_path(options.dump_folder)) / options.name
        self.cells = Cells(grid, self.folder)
        self.all = self.cells.all()
        self.forecaster = Forecaster(options.gpu)
        self.name, self.seconds = options.name, options.timeout_minutes * 60
        records = {cell.name: self.record(cell) for cell in self.all}
        self.stale = {name: row for name, row in records.items() if row.get("state") in retried}
        """records of runs to be run again, as they were at the start"""

        self.run_what_cannot_fit = run_what_cannot_fit

    def list(self) -> Iterator[str]:
        """Each run in a line, in the order of the grid, as soon as it is planned; then the fastest
        of each size and number of GPUs, and the time of those that are left."""
        fastest: dict[tuple[str, int], tuple[float, str]] = {}
        left: list[tuple[int, float]] = []
        width = max((len(cell.name) for cell in self.all), default=0)
        device = self.forecaster.device
        gpu = f", planned for {device.name}" if device else ""
        yield f"{counted(len(self.all), 'run')} in {self.folder}{gpu}"
        for number, cell in enumerate(self.all, 1):
            found = self.forecaster.forecast(cell)
            words = f"refused: {cell.refused}" if cell.refused else _forecast_text(found)
            state = self.record(cell).get("state", "waiting")
            line = f"{cell.name:{width}}  {state:9}  {words}"
            yield f"{number:4}  {line}"
            if found and found["fits"]:
                group, speed = (cell.factors["size"], cell.gpus), found["samples_per_second"]
                fastest[group] = max(fastest.get(group, (0.0, "")), (speed, line))
                if self._state(cell) not in FINAL and not self._predicted_oom(cell, found):
                    seconds = _START_SECONDS + cell.steps * found["seconds_per_step"]
                    left.append((cell.gpus, seconds))
        yield ""
        for (size, gpus), (_, line) in fastest.items():
            yield f"fastest {size} on {counted(gpus, 'GPU')}: {line}"
        hours = sum(seconds for _, seconds in left) / 3600
        gpu_hours = sum(gpus * seconds for gpus, seconds in left) / 3600
        yield (
            f"waiting, by the plan: {counted(len(left), 'run')}, {hours:,.1f} hours, {gpu_hours:,.1f} GPU hours, "
            f"with {_START_SECONDS:g} s to start and compile each"
        )

    def run(self, source: str) -> int:
        """Runs what is left, and keeps a copy of the grid's TOML. Returns 1 where a run has failed or timed
        out, and else 0."""
        write_atomic(self.folder / "grid.toml", source)
        total = len(self.all)
        left = [cell for cell in self.all if self._state(cell) not in FINAL]
        print(f"{total} runs, of which {total - len(left)} are done; {self.folder}", flush=True)
        began, times = time.time(), []
        for number, cell in enumerate(left, total - len(left) + 1):
            record: dict[str, Any] = {}
            with suppress(Timeout), self._lock(cell):
                if self._state(cell) not in FINAL:
                    record = self._one(cell)
            if not record:
                continue
            times += [record["seconds"]] if record["seconds"] else []
            remaining = sum(times) / len(times) * (total - number) if times else 0.0
            words = record["reason"] or figures(cell.folder)
            print(
                f"[{number}/{total}] {cell.name}: {record['state']}{': ' + words if words else ''} "
                f"({eta(time.time() - began)} elapsed, ETA {eta(remaining)})",
                flush=True,
            )
        states = Counter(self.record(cell).get("state", "waiting") for cell in self.all)
        print(", ".join(f"{count} {state}" for state, count in sorted(states.items())))
        if elsewhere := sum(count for state, count in states.items() if state not in FINAL):
            print(f"{elsewhere} runs are in progress in another command, or remain")
        return 1 if states["failed"] or states["timeout"] else 0

    def _state(self, cell: Cell) -> str:
        """Return the state of the cell's last run; "waiting" if it is to be run again and has not been yet."""
        record = self.record(cell)
        return "waiting" if record in ({}, self.stale.get(cell.name)) else record["state"]

    def _lock(self, cell: Cell) -> FileLock:
        """Held by the command that runs a cell of this group."""
        return FileLock(self.folder / f".{fingerprint(cell.group)}.lock", timeout=0)

    def _one(self, cell: Cell) -> dict[str, Any]:
        forecast = self.forecaster.forecast(cell)
        reason = cell.refused or self._predicted_oom(cell, forecast)
        if cell.nodes > int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) and not cell.refused:
            reason = f"it needs {cell.nodes} nodes; start the grid with --retry skipped in a SLURM job that has them"
        if reason:
            return self.keep(cell, Outcome("skipped", reason, 0.0), forecast)
        if cell.batch:
            return self.run_cell(cell, forecast)
        try:
            batch = self._largest_batch(cell)
        except TrialError as error:
            return self.keep(cell, error.outcome, forecast)
        while batch:
            found = self.cells.make(cell.axes, cell.repeat, batch, folder=cell.folder)
            record = self.run_cell(found, self.forecaster.forecast(found))
            if record["state"] != "oom":
                return record
            batch -= max(1, batch // 16)  # a longer run may need more than a trial
        outcome = Outcome("skipped", "not even a batch of 1 fits", 0.0)
        return self.keep(cell, outcome, forecast)

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

    def run_cell(self, cell: Cell, forecast: dict[str, Any] | None) -> dict[str, Any]:
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
            ended = run.wait(self.seconds, until=run.completed)
        except BaseException:
            run.end(GRACE_SECONDS)
            interrupted = Outcome("preempted", "the grid was ended", run.outcome().seconds)
            self.keep(cell, interrupted, forecast)
            raise
        run.end(GRACE_SECONDS)
        outcome = run.outcome()
        if not ended:
            late = f"not completed in {self.seconds / 60:g} minutes ({outcome.reason})"
            outcome = Outcome("timeout", late, outcome.seconds)
        return self.keep(cell, outcome, forecast)

    def run_succeeds(self, cell: Cell) -> bool:
        """True if a trial completes, and does not run out of memory; raises TrialError where it ends
        otherwise. One that was made before is not made again."""
        require(not cell.refused, cell.refused)
        record = self.record(cell)
        if record.get("state") not in ("completed", "oom"):
            record = self.run_cell(cell, None)
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
            "grid": self.name,
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

    def _predicted_oom(self, cell: Cell, forecast: dict[str, Any] | None) -> str:
        """Why a run would surely end out of memory; empty where it may fit."""
        group = [other for other in self.all if other.group == cell.group and other.batch]
        full = [other.batch for other in group if self._state(other) == "oom"]
        if cell.batch and full and min(full) <= cell.batch:
            return f"a batch of {min(full)} ran out of memory"
        if forecast is not None and not forecast["fits"] and not self.run_what_cannot_fit:
            return (
                f"plan: it needs {forecast['gib']:.1f} GiB, which a {forecast['gpu']} does not have"
            )
        return ""

    def _largest_batch(self, cell: Cell) -> int:
        """Search the largest batch by trials of a few steps in separate runs, which the repeats of a cell share."""
        folder = self.folder / "trials" / fingerprint(cell.group)

        def fits(batch: int) -> bool:
            trial = self.cells.make(cell.axes, 0, batch, TRIAL_SETTINGS, folder / f"bs{batch}")
            return self.run_succeeds(trial)

        return largest_that_fits(fits, self.forecaster.largest(cell) or _FIRST_BATCH)


def _forecast_text(forecast: Mapping[str, Any] | None) -> str:
    if forecast is None:
        return "no forecast"
    return (
        f"{forecast['samples_per_second']:9.1f} samples/s  {forecast['mfu']:6.1%} MFU  "
        f"{forecast['gib']:7.1f} GiB{'' if forecast['fits'] else '  DOES NOT FIT'}"
    )


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


class Forecaster:
    """Forecasts for a GPU of the plan's table; empty: this machine's, none where it is not known."""

    def __init__(self, gpu: str):
        self.device = find_device(gpu) if gpu else device_of(utils.device_module.get_device_name())
        self._models: dict[str, Model] = {}

    def forecast(self, cell: Cell) -> dict[str, Any] | None:
        """Memory, time and MFU of a run; None where the plan knows nothing of it, or fails."""
        return self._unless_it_fails(_forecast, cell) if cell.batch else None

    def largest(self, cell: Cell) -> int:
        """The largest micro-batch of the longest bucket that fits by the plan; 0 where there is no plan."""
        return self._unless_it_fails(lambda own: own.largest(own.longest()), cell) or 0

    def _unless_it_fails(self, predict: Callable[[Planner], Any], cell: Cell) -> Any:
        if self.device is None or cell.refused:
            return None
        try:
            check_device(cell.config, self.device)
        except InputError:
            return None
        sections = {name: dict(cell.content[name]) for name in _OF_THE_MODEL}
        for name in _OF_BATCHES:
            del sections["data"][name]
        key = json.dumps(sections, sort_keys=True)
        cluster = Cluster(self.device, cell.gpus // cell.nodes, cell.nodes)
        try:
            own = Planner(cell.config, cluster, self._models.get(key))
            self._models[key] = own.model
            return predict(own)
        except Exception as error:
            logger.warning(f"{cell.name}: no forecast ({type(error).__name__}: {error})")
            return None


def _forecast(own: Planner) -> dict[str, Any]:
    step = own.step(own.longest())
    steps = [step]
    if own.config.benchmark.lengths == "mixed":
        steps += [own.step(each) for _, each in own.buckets()]
    return {
        "gpu": own.cluster.device.name,
        "fits": all(each.fits for each in steps),
        "gib": max(each.bytes for each in steps) / 2**30,
        "seconds_per_step": step.seconds,
        "samples_per_second": step.samples / step.seconds,
        "mfu": step.mfu(step.seconds),
    }
