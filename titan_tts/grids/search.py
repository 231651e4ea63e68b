"""The largest batch that fits, by real steps.

Each trial is a run of its own in benchmark mode: the allocator starts empty, as in training, and where one
rank runs out of memory the launcher ends the others, so none hangs.
"""

from collections.abc import Callable

from titan_tts.grids.cells import Cell
from titan_tts.grids.runner import Runner
from torchtitan.models.dit_tts.errors import InputError

MAX_BATCH = 4096

TRIAL_SETTINGS = {"benchmark.steps": 1, "benchmark.warmup_steps": 3, "benchmark.profile": False}
"""of a trial: CUDA graphs are recorded in the third step"""


def largest_that_fits(fits: Callable[[int], bool], guess: int, limit: int = MAX_BATCH) -> int:
    """The largest n from 1 to `limit` with fits(n), as a linear search from 1 finds it; 0 if 1 does not fit.

    Steps of doubling size away from the guess enclose it, then bisection finds it, so a good guess takes
    few trials.

    Args:
        fits: monotonic; called once for each value.
        guess: where to begin.
    """
    low, high = 0, limit + 1  # fits, does not fit
    trial, step = min(max(guess, 1), limit), 1
    while low < trial < high:
        if fits(trial):
            low = trial
            trial = low + step
        else:
            high = trial
            trial = high - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def smaller(batch: int) -> int:
    """The batch to try after one that a short trial found to fit and a longer run did not."""
    return batch - max(1, batch // 16)


class TrialError(InputError):
    """A trial has ended for another reason than memory, in this state."""

    def __init__(self, state: str, message: str):
        super().__init__(message)
        self.state = state


def completes(runner: Runner, cell: Cell, tried: str) -> bool:
    """Whether a trial completes, and does not run out of memory; one that was made before is not made again.

    Args:
        tried: what it tries, for the log.

    Raises:
        TrialError: the trial ended for another reason than memory.
        InputError: training refuses the config.
    """
    if cell.refused:
        raise InputError(cell.refused)
    record = runner.record(cell)
    if record.get("state") not in ("completed", "oom"):
        record = runner.run(cell, None)
    state = record["state"]
    print(f"  {tried}: {state} ({record['seconds']:.0f} s)", flush=True)
    if state not in ("completed", "oom"):
        raise TrialError(
            state, f"the trial of {tried} ended with {state}: {record['reason']}; see {cell.folder}"
        )
    return state == "completed"
