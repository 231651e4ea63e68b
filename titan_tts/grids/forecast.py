"""Predictions of `titan-tts plan` for a grid's runs."""

import json
from collections.abc import Callable
from typing import Any

from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_tts.grids.cells import Cell
from titan_tts.plan.devices import Cluster, check_device, device_of, find_device
from titan_tts.plan.forecast import Planner
from titan_tts.plan.parameters import Model
from torchtitan.models.dit_tts.errors import InputError

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
