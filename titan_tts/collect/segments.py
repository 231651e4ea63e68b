"""Detects a recording's speech by Silero's voice activity detector, and cuts it into segments: at changes of speaker, at
pauses, and inside speech where nothing else is left.

The detector hears pieces of bounded memory. The wheel silero-vad brings the network as TorchScript, which needs torch
alone. It is loaded as a file: importing the package would set torch's number of threads for the whole process.

Times are whole milliseconds. Cuts divide the recording into cells; the segment of a cell is its speech with a little
silence on both sides, so that no two segments overlap and all speech is in one of them.
"""

from bisect import bisect, insort
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from torchtitan.models.dit_tts.errors import InputError, require_modules

RATE = 16_000  # Hz, of all that listens
FRAME_MS = 32  # of the detector
_FRAME = RATE * FRAME_MS // 1000
_PIECE = 1875  # frames: a minute, heard without what came before but for the warm-up
_WARM_UP = 32  # frames, whose results are dropped
_PIECES = 16  # at once
# Speech starts where the probability reaches the first and ends where it falls below the second, as Silero advises.
_START, _END = 0.5, 0.35
_MIN_FRAMES = 4  # of a pause, and of speech: 0.128 s

Span = tuple[int, int]
"""Start and stop in ms"""


class SpeechDetector:
    """Silero's probabilities of speech."""

    def __init__(self, device: str = "cpu") -> None:
        require_modules("silero_vad")
        package = find_spec("silero_vad")
        path = Path(str(package and package.origin)).with_name("data") / "silero_vad.jit"
        try:
            self.network: Any = torch.jit.load(path, map_location=device).eval()
        except (ValueError, RuntimeError) as error:
            raise InputError(f"{path} cannot be loaded; install silero-vad again") from error
        self.device = device

    def probabilities(self, waveform: np.ndarray) -> np.ndarray:
        """(m,) at 16 kHz -> (frames,) of 32 ms; the last one is filled with zeros."""
        frames = -(-len(waveform) // _FRAME)
        count = max(1, -(-frames // _PIECE))
        padding = _WARM_UP * _FRAME, count * _PIECE * _FRAME - len(waveform)
        size = (_WARM_UP + _PIECE) * _FRAME
        pieces = sliding_window_view(np.pad(waveform, padding), size)[:: _PIECE * _FRAME]
        found = []
        for first in range(0, count, _PIECES):
            heard = torch.from_numpy(pieces[first : first + _PIECES].copy()).to(self.device)
            self.network.reset_states()
            with torch.inference_mode():
                each = [self.network(step, RATE)[:, 0] for step in heard.split(_FRAME, dim=1)]
            found.append(torch.stack(each, 1)[:, _WARM_UP:].cpu().numpy().reshape(-1))
        return np.concatenate(found)[:frames]


def speech_regions(probabilities: np.ndarray, duration: int) -> np.ndarray:
    """(n, 2) int64: start and stop of speech in ms, with pauses of at least 0.128 s between."""
    marks = np.where(probabilities >= _START, 1, np.where(probabilities < _END, 0, -1))
    # What is neither goes on as what was before; the recording starts in silence.
    marks = np.concatenate([[0], marks])
    decided = np.maximum.accumulate(np.where(marks >= 0, np.arange(len(marks)), 0))
    speech = marks[decided][1:] == 1
    for value in (False, True):  # first short pauses, then short speech
        for start, stop in _runs(speech == value):
            inside = value or 0 < start and stop < len(speech)
            if stop - start < _MIN_FRAMES and inside:
                speech[start:stop] = not value
    return np.minimum(_runs(speech) * FRAME_MS, duration)


def _runs(mask: np.ndarray) -> np.ndarray:
    """(n, 2) int64: start and stop of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return edges.reshape(-1, 2).astype(np.int64)


def frame_power(waveform: np.ndarray) -> np.ndarray:
    """(m,) at 16 kHz -> (frames,) mean square of 10 ms; an incomplete last frame is left out."""
    hop = RATE // 100
    whole = waveform[: len(waveform) // hop * hop].reshape(-1, hop)
    return np.einsum("ij,ij->i", whole, whole) / np.float32(hop)


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
