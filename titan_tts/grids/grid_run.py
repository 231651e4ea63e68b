"""Runs what is left of a grid, by growing batch; larger batches are skipped after an OOM."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_tts.grids.cells import Cell, Cells
from titan_tts.grids.grid_file import GridFile
from titan_tts.grids.runner import FINAL, TRIAL_SETTINGS, Runner, TrialError, figures
from titan_tts.launch.supervisor import Outcome
from titan_tts.plan.devices import Cluster, check_device, device_of, find_device
from titan_tts.plan.forecast import Planner, largest_that_fits
from titan_tts.plan.parameters import Model
from titan_tts.report.words import counted
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import fingerprint, local_path, write_atomic
from torchtitan.models.dit_tts.metrics import eta

_OF_THE_MODEL = ("model", "encoder", "data", "lora", "distill")
"""Sections that decide about the model, but for `_OF_BATCHES`"""

_OF_BATCHES = ("batch_multiple", "bucket_frames", "num_buckets")


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


_START_SECONDS = 90.0
"""assumed: from a run's start to its first compiled step"""

_FIRST_BATCH = 8
"""with which a search begins where the plan knows nothing of the device"""


class GridRun:
    """A grid that is run or continued; runs in `retried` states are run again."""

    def __init__(self, grid: GridFile, retried: set[str], run_what_cannot_fit: bool = False):
        options = grid.grid
        self.folder = Path(local_path(options.dump_folder)) / options.name
        self.cells = Cells(grid, self.folder)
        self.all = self.cells.all()
        self.forecaster = Forecaster(options.gpu)
        self.runner = Runner(options.name, options.timeout_minutes * 60)
        records = {cell.name: self.runner.record(cell) for cell in self.all}
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
            state = self.runner.record(cell).get("state", "waiting")
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
        states = Counter(self.runner.record(cell).get("state", "waiting") for cell in self.all)
        print(", ".join(f"{count} {state}" for state, count in sorted(states.items())))
        if elsewhere := sum(count for state, count in states.items() if state not in FINAL):
            print(f"{elsewhere} runs are in progress in another command, or remain")
        return 1 if states["failed"] or states["timeout"] else 0

    def _state(self, cell: Cell) -> str:
        """Return the state of the cell's last run; "waiting" if it is to be run again and has not been yet."""
        record = self.runner.record(cell)
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
            return self.runner.keep(cell, Outcome("skipped", reason, 0.0), forecast)
        if cell.batch:
            return self.runner.run(cell, forecast)
        try:
            batch = self._largest_batch(cell)
        except TrialError as error:
            return self.runner.keep(cell, error.outcome, forecast)
        while batch:
            found = self.cells.make(cell.axes, cell.repeat, batch, folder=cell.folder)
            record = self.runner.run(found, self.forecaster.forecast(found))
            if record["state"] != "oom":
                return record
            batch -= max(1, batch // 16)  # a longer run may need more than a trial
        outcome = Outcome("skipped", "not even a batch of 1 fits", 0.0)
        return self.runner.keep(cell, outcome, forecast)

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
            return self.runner.run_succeeds(trial)

        return largest_that_fits(fits, self.forecaster.largest(cell) or _FIRST_BATCH)


def _forecast_text(forecast: Mapping[str, Any] | None) -> str:
    if forecast is None:
        return "no forecast"
    return (
        f"{forecast['samples_per_second']:9.1f} samples/s  {forecast['mfu']:6.1%} MFU  "
        f"{forecast['gib']:7.1f} GiB{'' if forecast['fits'] else '  DOES NOT FIT'}"
    )
