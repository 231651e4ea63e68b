"""The fastest layout and the largest micro-batch of every length bucket, by trials of a few steps."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from titan_tts.grids.cells import Cell, Cells
from titan_tts.grids.forecast import Forecaster
from titan_tts.grids.grid_file import GridFile
from titan_tts.grids.grid_file import Options as GridOptions
from titan_tts.grids.options import Options
from titan_tts.grids.runner import TRIAL_SETTINGS, Runner, TrialError, figures
from titan_tts.grids.search import largest_that_fits, smaller
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.config.batch_split import batch_split
from torchtitan.models.dit_tts.config.job_config import MAX_BUCKETS, JobConfig
from torchtitan.models.dit_tts.data.buckets import choose_edges, select_samples
from torchtitan.models.dit_tts.data.build import open_training_data, sample_draws
from torchtitan.models.dit_tts.errors import InputError, printable, require
from torchtitan.models.dit_tts.files import fingerprint, held

_MEASURED = {"benchmark.steps": 10, "benchmark.warmup_steps": 5, "benchmark.profile": False}
_AXIS_KEYS = {
    "layout": ("parallelism", ("data_parallel_replicate_degree", "data_parallel_shard_degree")),
    "checkpointing": ("activation_checkpoint", ("mode", "selective_ac_option", "memory_budget")),
}
_CHECKS = 4
"""times that all buckets are tried together, each with smaller batches than before"""


@dataclass(frozen=True)
class Choice:
    """A layout and a kind of checkpointing, with its largest micro-batch of the longest bucket."""

    axes: dict[str, Any]
    """empty values: the config's own"""

    batch: int
    samples_per_second: float
    mfu: float | None
    reason: str = ""
    """why it has no micro-batch; empty where it has one"""


@dataclass(frozen=True)
class Found:
    choices: list[Choice]
    best: Choice
    frames: list[int]
    alone: list[int]
    """largest micro-batch of each of `frames` that fits in a run of its own"""

    micro_batches: list[int]
    """with which all fit in one run"""

    accumulation: int
    ranks: int
    keys: dict[str, dict[str, Any]]

    def toml(self) -> str:
        """The keys, with all choices as comments."""
        lines = [
            f"# {self.ranks} ranks, accumulation steps: {self.accumulation}",
            f"# largest micro-batches per bucket of {self.frames} frames: {self.micro_batches}",
        ]
        for choice in sorted(self.choices, key=lambda each: -each.samples_per_second):
            values = ", ".join(f"{axis} {value}" for axis, value in choice.axes.items())
            words = printable(" ".join(choice.reason.split()))
            if choice.batch:
                words = f"micro-batch {choice.batch}, {choice.samples_per_second:.2f} samples/s"
                words += "" if choice.mfu is None else f", {choice.mfu:.1%} MFU"
            lines.append(f"# {values or 'as configured'}: {words}")
        return "\n".join([*lines, "", tomli_w.dumps(self.keys)])


class Autotune:
    """The search for a config as it is for training, with its trials in `folder`."""

    def __init__(self, config: JobConfig, options: Options, folder: Path):
        self.config = config
        self.options = options
        self.ranks = max(1, options.nproc // config.parallelism.tensor_parallel_degree)
        self.global_batch, _ = batch_split(config.training, self.ranks)
        axes = {"layout": options.layouts, "checkpointing": options.checkpointing}
        self.axes = {axis: values for axis, values in axes.items() if values}
        self.forecaster = Forecaster("")
        self.runner = Runner("autotune", options.timeout_minutes * 60)
        processes, memory = options.nproc, options.memory_gib
        grid = GridOptions(
            config="base", gpus=processes, gpus_per_node=processes, memory_gib=memory
        )
        self.cells = Cells(GridFile(grid), folder, config)

    def run(self) -> Found:
        folder = self.cells.folder
        folder.mkdir(parents=True, exist_ok=True)
        refusal = f"{folder}: is in use by another command; give another --work"
        with held(folder / ".lock", refusal):
            return self._run()

    def _run(self) -> Found:
        frames = self._edges()
        combined = itertools.product(*self.axes.values())
        axes = [dict(zip(self.axes, values)) for values in combined]
        refused = [self._refusal(each, frames) for each in axes]  # of all, before the first trial
        choices = [self._choice(*each, frames[-1]) for each in zip(axes, refused)]
        fitting = [choice for choice in choices if choice.batch]
        if not fitting:
            raise InputError(choices[0].reason)
        best = max(fitting, key=lambda choice: choice.samples_per_second)
        batches = {frames[-1]: best.batch}
        longer = frames[-1]
        for edge in frames[-2::-1]:
            limit = (
                best.batch * frames[-1] // edge
            )  # a bucket has at most the frames of the longest
            batches[edge] = self._largest(best.axes, edge, batches[longer] * longer // edge, limit)
            longer = edge
        alone = [batches[edge] for edge in frames]
        sizes = self._checked(best.axes, frames, alone)
        steps, keys = self._keys(best, frames, sizes)
        return Found(choices, best, frames, alone, sizes, steps, self.ranks, keys)

    def _edges(self) -> list[int]:
        """Upper lengths of the buckets; prints where they come from."""
        data = self.config.data
        require(
            data.batching == "buckets",
            "[data] batching = 'packed' has no buckets to find micro-batches for; set it to 'buckets'",
        )
        if self.options.buckets or data.bucket_frames:
            edges = sorted(self.options.buckets or data.bucket_frames)
            origin = "as given"
        else:
            dataset = open_training_data(data)
            # As the loader does, but without counting the tokens of all texts.
            no_tokens = np.zeros(len(dataset))
            selection = select_samples(dataset.frames, no_tokens, data, dataset.sample_id)
            draws = sample_draws(data, dataset, selection)
            edges = choose_edges(selection.frames, data.num_buckets, data.max_frames, draws)
            origin = "of [data] path"
        ascending = all(low < high for low, high in zip([0, *edges], edges))
        if not ascending or len(edges) > MAX_BUCKETS or edges[-1] > data.max_frames:
            raise InputError(
                f"buckets of {edges} frames, but they must be up to {MAX_BUCKETS} different lengths from 1 to "
                f"[data] max_frames = {data.max_frames}"
            )
        print(f"buckets {origin}: {edges} frames", flush=True)
        return edges

    def _cell(self, axes: dict[str, Any], edge: int, batch: int, settings: dict[str, Any]) -> Cell:
        kind = "_".join(map(str, axes.values())).replace(" ", "-") or "own"
        name = f"{kind}/frames{edge}/bs{batch}_{settings['benchmark.steps']}"
        changed = {"data.max_frames": edge, "data.bucket_frames": [], "data.num_buckets": 1}
        changed |= {"data.bucket_batch_sizes": [], **settings}
        return self.cells.make(axes | {"batch": batch}, 0, None, changed, self.cells.folder / name)

    def _largest(self, axes: dict[str, Any], edge: int, guess: int, limit: int) -> int:
        chosen = "".join(f", {axis} {value}" for axis, value in axes.items())
        bounds = f"the first guess is {min(guess, limit)}, the limit {limit}"
        print(f"bucket of {edge} frames{chosen}: {bounds}", flush=True)

        def fits(batch: int) -> bool:
            cell = self._cell(axes, edge, batch, TRIAL_SETTINGS)
            return self.runner.run_succeeds(cell, f"batch {batch}")

        return largest_that_fits(fits, guess, limit)

    def _refusal(self, axes: dict[str, Any], frames: list[int]) -> str:
        """The sentence with which training would refuse trials of a choice; empty where it starts."""
        cells = [self._cell(axes, edge, 1, TRIAL_SETTINGS) for edge in frames]
        cells.append(self._together(axes, frames, [1] * len(frames)))
        return next((cell.refused for cell in cells if cell.refused), "")

    def _choice(self, axes: dict[str, Any], refused: str, edge: int) -> Choice:
        """With its figures, or else with the reason why it has none."""
        reason = refused or (
            f"not even one sample of {edge} frames fits; shard over more GPUs, or set "
            f"[activation_checkpoint] mode = 'full'"
        )
        try:
            if not refused and (found := self._measured(axes, edge)):
                return found
        except TrialError as error:
            reason = str(error)
        print(f"{', '.join(map(str, axes.values())) or 'as configured'}: {reason}", flush=True)
        return Choice(axes, 0, 0.0, None, reason)

    def _measured(self, axes: dict[str, Any], edge: int) -> Choice | None:
        one = self._cell(axes, edge, 1, TRIAL_SETTINGS)
        limit = self.global_batch // self.ranks  # of one step without accumulation
        batch = self._largest(axes, edge, self.forecaster.largest(one) or 8, limit)
        while batch:
            cell = self._cell(axes, edge, batch, _MEASURED)
            if self.runner.run_succeeds(cell, f"micro-batch {batch} for some steps"):
                report = read_json(cell.folder / "benchmark.json")
                print(f"  {figures(cell.folder)}", flush=True)
                return Choice(axes, batch, report["samples_per_second"], report["mfu"])
            batch = smaller(batch)
        return None

    def _together(self, axes: dict[str, Any], frames: list[int], sizes: list[int]) -> Cell:
        settings = {
            "benchmark.lengths": "mixed",
            "benchmark.steps": len(frames),
            "benchmark.warmup_steps": 3,
            "benchmark.profile": False,
            "data.bucket_frames": frames,
            "data.bucket_batch_sizes": [size * self.ranks for size in sizes],
            "data.max_frames": frames[-1],
            "data.num_buckets": len(frames),
        }
        tried = fingerprint(json.dumps([axes, frames, sizes]))
        folder = self.cells.folder / "all_buckets" / tried
        return self.cells.make(axes | {"batch": sizes[-1]}, 0, None, settings, folder)

    def _checked(self, axes: dict[str, Any], frames: list[int], sizes: list[int]) -> list[int]:
        """The micro-batches with which all buckets fit one after another in one run: memory that the
        allocator keeps for one shape is missing in the next."""
        for _ in range(_CHECKS):
            cell = self._together(axes, frames, sizes)
            if self.runner.run_succeeds(cell, f"all buckets with micro-batches {sizes}"):
                return sizes
            sizes = [max(1, smaller(size)) for size in sizes]
        raise InputError(
            f"each bucket fits alone, but not all in one run, not even with micro-batches of {sizes}; give "
            f"fewer --buckets"
        )

    def _keys(
        self, best: Choice, frames: list[int], sizes: list[int]
    ) -> tuple[int, dict[str, dict[str, Any]]]:
        """(accumulation steps, keys of the config) of global batches of about the config's size."""
        wanted = self.global_batch
        steps = -(-wanted // (sizes[-1] * self.ranks))
        micro = -(-wanted // (self.ranks * steps))  # the smallest that comes to the global batch
        blocks = self.ranks * steps
        batches = []
        for edge, size in zip(frames, [*sizes[:-1], micro], strict=True):
            budget = micro * frames[-1] // edge  # as many frames as in the longest bucket
            batches.append(max(1, min(size, budget)) * blocks)
        cell = self.cells.make(best.axes, 0)
        keys: dict[str, dict[str, Any]] = {
            "data": {
                "max_frames": frames[-1],
                "bucket_frames": frames,
                "bucket_batch_sizes": batches,
                "batch_multiple": blocks,
            },
            "training": {"local_batch_size": micro, "global_batch_size": micro * blocks},
        }
        for axis in best.axes:
            section, names = _AXIS_KEYS[axis]
            keys[section] = {name: cell.content[section][name] for name in names}
        return steps, keys
