"""Values and times of the device that the host reads later, when it need not wait for them."""

import time
from typing import Any

import torch

from torchtitan.tools import utils


class HostCopy:
    """Values of a device's tensor on their way to the host."""

    def __init__(self, values: torch.Tensor):
        self._values, self._event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def moment() -> Any:
    """Now, or, on a GPU, when it has done what is queued so far."""
    if utils.device_type == "cpu":
        return time.perf_counter()
    event = utils.device_module.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two recorded moments, both of which have been reached."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
