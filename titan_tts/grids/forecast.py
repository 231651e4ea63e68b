"""What `titan-tts plan` predicts of a grid's runs."""

import json
from collections.abc import Callable
from typing import Any

from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_tts.grids.cells import Cell
from titan_tts.plan.devices import Cluster, Device, check_device, device_of, find_device, with_peak
from titan_tts.plan.memory import Activations
from titan_tts.plan.plan import estimated_buckets
from titan_tts.plan.planner import Planner, longest_batches
from titan_tts.plan.step_time import GUESS
from torchtitan.models.dit_tts.config.checks import data_parallel_degree
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.errors import InputError

_GIB = 2**30
_VARIED = ("parallelism", "activation_checkpoint", "compile", "job")
"""Sections in which the configs of one `Planner` may differ; and batches"""


class Forecaster:
    """Forecasts for a GPU of the plan's table; empty: this machine's, none where it is not known."""

    def __init__(self, gpu: str):
        self.device = find_device(gpu) if gpu else device_of(utils.device_module.get_device_name())
        self._planners: dict[str, Planner] = {}
        self._activations: dict[str, Activations] = {}

    def forecast(self, cell: Cell) -> dict[str, Any] | None:
        """Memory, time and MFU of a run; None where the plan knows nothing of it, or fails."""
        return self._unless_it_fails(self._forecast, cell) if cell.batch else None

    def largest(self, cell: Cell) -> int:
        """The largest micro-batch of the longest bucket that fits by the plan; 0 where there is no plan."""
        return self._unless_it_fails(self._largest, cell) or 0

    def _unless_it_fails(self, predict: Callable[[Cell, Device], Any], cell: Cell) -> Any:
        if self.device is None or cell.refused:
            return None
        device = with_peak(self.device, cell.config)
        try:
            check_device(cell.config, device)
        except InputError:
            return None
        try:
            return predict(cell, device)
        except Exception as error:
            logger.warning(f"{cell.name}: no forecast ({type(error).__name__}: {error})")
            return None

    def _forecast(self, cell: Cell, device: Device) -> dict[str, Any]:
        ranks = data_parallel_degree(cell.config, cell.gpus)
        config = upstream_view(cell.config, run_folder_path(cell.config), ranks)
        cluster = Cluster(device, cell.gpus // cell.nodes, cell.nodes)
        planner = self._planner(cell)
        batches = longest_batches(config, ranks)
        step = planner.step(config, cluster, GUESS, batches)
        memory = [step.memory]
        if config.benchmark.lengths == "mixed":
            others = estimated_buckets(config, ranks)
            memory += [planner.memory(config, device, each) for _, each in others]
        return {
            "gpu": device.name,
            "fits": all(each.fits for each in memory),
            "gib": max(each.total for each in memory) / _GIB,
            "seconds_per_step": step.seconds.estimate,
            "samples_per_second": step.samples_per_second.estimate,
            "mfu": step.mfu.estimate,
        }

    def _largest(self, cell: Cell, device: Device) -> int:
        batches = longest_batches(cell.config, data_parallel_degree(cell.config, cell.gpus))
        return self._planner(cell).largest(cell.config, device, batches)

    def _planner(self, cell: Cell) -> Planner:
        content = cell.content
        training = {**content["training"], "local_batch_size": 0, "global_batch_size": 0}
        data = {**content["data"], "batch_multiple": 0}
        rest = {key: value for key, value in content.items() if key not in _VARIED}
        ranks = data_parallel_degree(cell.config, cell.gpus)
        key = json.dumps(
            [cell.gpus, ranks, {**rest, "training": training, "data": data}], sort_keys=True
        )
        if key not in self._planners:
            self._planners[key] = planner = Planner(cell.config, cell.gpus)
            # Passes over tensors without data take most of the time; nothing else decides about them.
            config, known = cell.config, (planner.sizes.args, planner.longest.lengths)
            dtypes = config.training.dtype, config.training.mixed_precision_param
            shared = repr((*known, dtypes, config.encoder))
            planner.activations = self._activations.setdefault(shared, planner.activations)
        return self._planners[key]
