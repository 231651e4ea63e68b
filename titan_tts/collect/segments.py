"""Cuts a recording into segments: at changes of speaker, at pauses, and inside speech where nothing else is left.

Times are whole milliseconds. Cuts divide the recording into cells; the segment of a cell is its speech with a little
silence on both sides, so that no two segments overlap and all speech is in one of them.
"""

from bisect import bisect, insort
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

PADDING = 60
"""ms of silence that a segment has before and after its speech, where the pause is long enough"""

_LEAST, _MOST = 3000, 12_000  # ms that a segment shall have, where the pauses allow it
_JOINED = 1000  # ms: over a shorter pause a segment goes on while it has less than `_LEAST`
_SMOOTHING = 5  # frames of 10 ms over which the quietest place is looked for


class Limits(NamedTuple):
    """Lengths in ms; `longest` is at least twice `shortest`, so that what is too long can always be cut."""

    shortest: int
    longest: int
    pause: int  # one as long as this may end a segment

    @property
    def joined(self) -> int:
        """A pause as long as this always ends one."""
        return max(self.pause, _JOINED)


def cut(
    regions: np.ndarray, duration: int, changes: Iterable[int], power: np.ndarray, limits: Limits
) -> list[tuple[int, int]]:
    """(start, stop) of each segment, in order. A recording that is shorter than `limits.shortest` has none.

    Cuts come in this order, and none that would leave less than `shortest` between two cuts: changes of speaker;
    pauses of at least `limits.joined`, the longest first. Then those that leave no less than 3 s: pauses of at least
    `limits.pause`, and of what is still longer than 12 s its longest pause. At last, of what is longer than
    `longest`, its longest pause, or, where it has none, its quietest place.

    Args:
        regions: (n, 2) start and stop of speech, in order, with pauses between.
        changes: times of changes of speaker, the most certain first.
        power: (frames,) mean square of 10 ms each.
    """
    cuts = [0, duration]
    if not len(regions) or duration < limits.shortest:
        return []
    least = max(limits.shortest, min(_LEAST, limits.longest // 2))
    pauses = [
        (stop - start, (start + stop) // 2)
        for start, stop in zip(regions[:-1, 1].tolist(), regions[1:, 0].tolist(), strict=True)
    ]
    pauses.sort(key=lambda pause: (-pause[0], pause[1]))
    for time in changes:
        _cut_at(cuts, time, limits.shortest)
    for length, middle in pauses:
        if length >= limits.pause:
            _cut_at(cuts, middle, limits.shortest if length >= limits.joined else least)
    middles = [middle for _, middle in pauses]
    cell = 0
    while cell < len(cuts) - 1:
        begin, end = cuts[cell], cuts[cell + 1]
        segment = _segment(regions, begin, end, limits.shortest) or (begin, begin)
        length, inside = segment[1] - segment[0], [m for m in middles if begin < m < end]
        if length > min(_MOST, limits.longest) and any(_cut_at(cuts, m, least) for m in inside):
            continue
        if length <= limits.longest:
            cell += 1
        elif not any(_cut_at(cuts, m, limits.shortest) for m in inside):
            first = max(segment[0] + limits.longest // 2, begin + limits.shortest)
            last = min(segment[0] + limits.longest, end - limits.shortest)
            insort(cuts, quietest(power, first, last))
    cells = zip(cuts[:-1], cuts[1:], strict=True)
    found = (_segment(regions, begin, end, limits.shortest) for begin, end in cells)
    return [segment for segment in found if segment is not None]


def _cut_at(cuts: list[int], time: int, shortest: int) -> bool:
    """Adds a cut unless another cut or an end of the recording is nearer than `shortest`."""
    after = bisect(cuts, time)
    if not 0 < after < len(cuts) or min(time - cuts[after - 1], cuts[after] - time) < shortest:
        return False
    cuts.insert(after, time)
    return True


def _segment(regions: np.ndarray, begin: int, end: int, shortest: int) -> tuple[int, int] | None:
    """The speech of a cell with its padding, at least `shortest` long; None where it has no speech."""
    inside = regions[np.searchsorted(regions[:, 1], begin, "right") :]
    inside = inside[: np.searchsorted(inside[:, 0], end, "left")]
    if not len(inside):
        return None
    start, stop = int(inside[0, 0]) - PADDING, int(inside[-1, 1]) + PADDING
    start = max(begin, start - max(0, shortest - (stop - start)) // 2)
    stop = min(end, max(stop, start + shortest))
    return min(start, stop - shortest), stop


def quietest(power: np.ndarray, first: int, last: int) -> int:
    """The quietest time from `first` to `last`, both in ms; the earliest of several."""
    frames = power[first // 10 : max(last // 10, first // 10 + 1)]
    if len(frames) == 0:
        return first
    smooth = np.convolve(frames, np.ones(_SMOOTHING), "same")
    # At the edges the sum has fewer frames, which would make them look quiet.
    smooth /= np.convolve(np.ones(len(frames)), np.ones(_SMOOTHING), "same")
    return min(max(first, (first // 10 + int(smooth.argmin())) * 10 + 5), last)
