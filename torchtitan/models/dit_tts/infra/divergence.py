"""Skips steps whose loss or gradient norm is not finite or a spike, before they change weights.

The device compares loss and gradient norm of every step with limits from the steps before, and the optimizer skips a
step that exceeds them. The host reads the outcome one step later, so neither waits.
"""

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.config.run_sections import BAD_STEPS_WINDOW
from torchtitan.models.dit_tts.infra.device_time import HostCopy

WINDOW, RECENT = 128, 16
"""Number of steps for the spread, and of the last steps for the level"""

MIN_HISTORY = 32
"""Number of steps before the spread is used"""

LOSS_FACTOR, NORM_FACTOR = 3.0, 20.0
"""Minimum multiple of the level that is a spike. A batch of another length or source may have twice the
loss; gradient norms may grow tenfold in a sound run, and clipping takes the rest."""

HIGHEST_FACTOR = 1.25
"""Minimum multiple of the window's highest accepted value that is a spike"""

LOWEST_FACTOR = 5.0
"""A loss above this multiple of the run's lowest level is a spike, however slowly it rose, unless the spread
allows more"""

HARD_LIMIT_FACTOR = 100.0
"""A loss above this multiple of the level is a spike whatever the spread. (The loss of single utterances
varies by a factor of 20 with the diffusion time.)"""

_MEDIAN_TO_STD = 1.4826 / math.sqrt(2)
"""standard deviation of independent normal values over the median of their absolute differences"""


@dataclass(frozen=True)
class StepStats:
    """A step's loss and gradient norm, and their limits."""

    step: int
    global_batch: int
    loss: float
    grad_norm: float
    loss_limit: float
    norm_limit: float
    bad: bool

    def __str__(self) -> str:
        def part(name: str, value: float, limit: float) -> str:
            if not math.isfinite(value) or math.isinf(limit):
                return f"{name} {value:.4g}"
            return f"{name} {value:.4g} (at most {limit:.4g} expected)"

        loss = part("loss", self.loss, self.loss_limit)
        return f"step {self.step}: {loss}, {part('gradient norm', self.grad_norm, self.norm_limit)}"


def spike_limit(
    logs: list[float], sigmas: float, factor: float, hard_limit: float, lowest: float = math.inf
) -> float:
    """The largest value that is not a spike.

    The limit is the larger of level · exp(max(sigmas · spread, ln factor)) and 1.25 times the highest value;
    at most level · hard_limit, and as much above the lowest level as `LOWEST_FACTOR` and the spread allow.
    The spread comes from the differences of neighbours, so that a loss that falls quickly does not look
    noisy. Before there are `MIN_HISTORY` values the limit is level · hard_limit.

    Args:
        logs: natural logarithms of the last values, oldest first.
        sigmas: 0: there is no limit.
        lowest: logarithm of the lowest level so far.
    """
    if not logs or not sigmas:
        return math.inf
    level = statistics.median(logs[-RECENT:])
    limit = level + math.log(hard_limit)
    if len(logs) >= MIN_HISTORY:
        steps = statistics.median(abs(b - a) for a, b in itertools.pairwise(logs))
        noise = sigmas * _MEDIAN_TO_STD * steps
        usual = max(level + max(noise, math.log(factor)), max(logs) + math.log(HIGHEST_FACTOR))
        limit = min(limit, usual, lowest + max(noise, math.log(LOWEST_FACTOR)))
    return math.exp(limit) if limit < 700.0 else math.inf


class DivergenceGuard:
    """Judges each step, and is saved in checkpoints. `sigmas`: standard deviations of the logarithm above the level
    that are a spike; 0: only values that are not finite are bad."""

    def __init__(self, sigmas: float):
        self.sigmas = sigmas
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.recent: deque[float] = deque(maxlen=BAD_STEPS_WINDOW)
        self.lowest = math.inf
        self._pending: tuple[StepStats, HostCopy] | None = None

    def judge(
        self,
        step: int,
        global_batch: int,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Compares a step on the device, without a wait. The stats of the step before must have been read.

        Args:
            loss, grad_norm: () of the global batch.
            group: ranks that must judge alike, although their norms may differ in the last bit.

        Returns:
            () float32, on the norm's device: 1 if the step must be skipped, else 0.
        """
        assert self._pending is None
        loss_limit = spike_limit(
            list(self.losses), self.sigmas, LOSS_FACTOR, HARD_LIMIT_FACTOR, self.lowest
        )
        norm_limit = spike_limit(list(self.norms), self.sigmas, NORM_FACTOR, math.inf)
        # With CPU offload the gradients, their norm and the optimizer are on the CPU.
        loss = loss.detach().to(grad_norm.device)
        values = torch.stack([loss.float(), grad_norm.detach().float()])
        # Plain numbers, which need no copy to the device. A comparison with nan is false.
        good = values.isfinite().all() & (values[0] <= loss_limit) & (values[1] <= norm_limit)
        bad = (~good).float()
        if group is not None:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group)
        stats = StepStats(step, global_batch, math.nan, math.nan, loss_limit, norm_limit, bad=False)
        self._pending = stats, HostCopy(torch.cat([values, bad[None]]))
        return bad

    def read(self) -> StepStats | None:
        """The outcome of the last judged step, or None if it was read already. Waits for the device."""
        if self._pending is None:
            return None
        known, found = self._pending
        self._pending = None
        loss, norm, bad = found.read()
        stats = replace(known, loss=loss, grad_norm=norm, bad=bool(bad))
        self.recent.append(bad)
        if not bad:
            # The logarithm of 0 would be no number; nothing is a spike against it.
            self.losses.append(math.log(max(loss, 1e-30)))
            self.norms.append(math.log(max(norm, 1e-30)))
            if len(self.losses) >= RECENT:
                self.lowest = min(self.lowest, statistics.median(list(self.losses)[-RECENT:]))
        return stats

    @property
    def bad_recently(self) -> int:
        """Number of bad steps among the last `BAD_STEPS_WINDOW`."""
        return int(sum(self.recent))

    def state_dict(self) -> dict[str, Any]:
        """Tensors of fixed sizes, since checkpoints load in place."""
        rows = {"losses": self.losses, "norms": self.norms, "recent": self.recent}
        state = {}
        for name, values in rows.items():
            state[name] = torch.zeros(1 + WINDOW, dtype=torch.float64)
            state[name][0] = len(values)
            state[name][1 : 1 + len(values)] = torch.tensor(list(values), dtype=torch.float64)
        state["lowest"] = torch.tensor(self.lowest, dtype=torch.float64)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = None
        self.lowest = float(state_dict["lowest"])
        for name in ("losses", "norms", "recent"):
            count, *values = state_dict[name].tolist()
            getattr(self, name).clear()
            getattr(self, name).extend(values[: int(count)])
