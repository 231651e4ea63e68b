"""Searches the largest batch that fits in few trials, which may be runs or forecasts."""

from collections.abc import Callable

MAX_BATCH = 4096


def largest_that_fits(fits: Callable[[int], bool], guess: int, limit: int = MAX_BATCH) -> int:
    """The largest n from 1 to `limit` with fits(n), as a linear search from 1 finds it; 0 if 1 does not fit.

    Steps of doubling size away from the guess enclose it, then bisection finds it, so a good guess takes
    few trials. `fits`: monotonic; called once for each value.
    """
    low, high = 0, limit + 1  # fits, does not fit
    trial, step = min(max(guess, 1), limit), 1
    while high - low > 1:
        if fits(trial):
            low, trial = trial, trial + step
        else:
            high, trial = trial, trial - step
        step *= 2
        if not low < trial < high:  # enclosed
            trial = (low + high) // 2
    return low
