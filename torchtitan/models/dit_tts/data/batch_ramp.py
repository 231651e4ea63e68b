"""Smaller global batches at the start, by the position alone.

The order's global batches stay as they are. While the ramp's divisor is d, one of G samples is delivered
as d consecutive batches of G/d: its rows 0 ... G/d - 1 first. So nothing is left out or comes twice, and
the position of a step's batch in the order is a closed form of the step's number.

>>> ramp = BatchRamp((4, 2), 8)      # 8 steps of a quarter, 8 of a half, then complete ones
>>> [ramp.place(number) for number in (0, 3, 4, 7, 8, 9, 15, 16)]
[(0, 0, 4), (0, 3, 4), (1, 0, 4), (1, 3, 4), (2, 0, 2), (2, 1, 2), (5, 1, 2), (6, 0, 1)]

So 16 steps of the ramp are 2 + 4 global batches of the order. A step has as many micro-batches as it takes
to keep them within their complete size (`ramp_accumulation`): of 4 accumulation steps, 1, then 2.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.models.dit_tts.config.batch_split import ramp_accumulation
from torchtitan.models.dit_tts.config.job_config import Training

_ENDLESS = 1 << 62


class Place(NamedTuple):
    """Part `part` of `divisor` equal parts of global batch `full` of the order."""

    full: int
    part: int
    divisor: int


@dataclass(frozen=True)
class BatchRamp:
    """`number` is a step's position in the data, from 0, and `accumulation` the micro-batches of a complete
    global batch.

    Attributes:
        divisors: of the global batch, one phase each.
        steps: of each phase, a multiple of every divisor.
    """

    divisors: tuple[int, ...] = ()
    steps: int = 0

    @property
    def _phases(self) -> list[tuple[int, int]]:
        """(steps, divisor), the last without an end."""
        return [*((self.steps, divisor) for divisor in self.divisors), (_ENDLESS, 1)]

    def place(self, number: int) -> Place:
        full = 0
        for steps, divisor in self._phases:
            if number < steps:
                return Place(full + number // divisor, number % divisor, divisor)
            number, full = number - steps, full + steps // divisor
        raise AssertionError("the last phase has no end")

    def steps_before(self, full: int) -> int:
        """Steps that the first `full` global batches of the order are."""
        number = 0
        for steps, divisor in self._phases:
            if full * divisor < steps:
                break
            number, full = number + steps, full - steps // divisor
        return number + full * divisor

    def global_batches(self, steps: int) -> float:
        """Global batches of the order that the first steps are."""
        place = self.place(steps)
        return place.full + place.part / place.divisor

    def accumulation(self, number: int, accumulation: int) -> int:
        """Micro-batches of a step."""
        return ramp_accumulation(accumulation, self.place(number).divisor)

    def first_micro_batch(self, number: int, accumulation: int) -> int:
        """Micro-batches before a step."""
        before = 0
        for steps, divisor in self._phases:
            taken = min(number, steps)
            before += taken * ramp_accumulation(accumulation, divisor)
            number -= taken
        return before

    def of_micro_batch(self, position: int, accumulation: int) -> tuple[int, int]:
        """(number of the step, micro-batch within it) of the micro-batch at `position`."""
        number = 0
        for steps, divisor in self._phases:
            each = ramp_accumulation(accumulation, divisor)
            if position < steps * each:
                break
            number, position = number + steps, position - steps * each
        return number + position // each, position % each


def batch_ramp(training: Training) -> BatchRamp:
    """The ramp that `[training] batch_ramp` sets."""
    return BatchRamp(tuple(training.batch_ramp), training.batch_ramp_steps)
