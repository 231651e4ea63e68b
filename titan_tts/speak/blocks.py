"""Says an utterance block by block, so that its first sound is there before its end is computed.

A block has the text of the whole utterance and the latents before it, which it continues. It is generated with `AHEAD`
more frames: of these the next block keeps `CONTEXT`, from which a decoder makes the end of this one as it will then, and makes
the others anew, as what stands at the end of a batch sounds like the end of a text. All latents so far are decoded at
once, so a decoder goes on where it was.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from titan_tts.speak.utterance import Speech, Utterance, part

FIRST = 24
"""frames of the first block"""

GROWTH = 2
"""of the frames so far, from block to block"""

AHEAD = 8
"""frames generated behind a block"""

CONTEXT = 3
"""of these, which stay"""

FADE_SECONDS = 0.01
"""over which the sound of one decoding becomes that of the next"""


def block_ends(frames: int, first: int = FIRST) -> list[int]:
    """Where the blocks of an utterance of so many frames end; a last one too short to be worth it joins its neighbour."""
    ends = [first]
    while ends[-1] + AHEAD < frames:
        ends.append(ends[-1] * GROWTH)
    return [*ends[:-1], frames]


@dataclass
class Blocks:
    """The blocks of an utterance whose length is set."""

    utterance: Utterance
    hop: int
    """samples per frame"""

    pieces: int = 1
    """of the text whose first one this is"""

    _ends: list[int] = field(init=False)
    _begin: int = field(default=0, init=False)
    _latents: Tensor | None = field(default=None, init=False)
    _last: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)

    def __post_init__(self) -> None:
        assert self.utterance.frames is not None
        self._ends = block_ends(self.utterance.frames)

    @property
    def next(self) -> Utterance | None:
        """The next utterance to say; None at the end."""
        frames = self.utterance.frames
        if not self._ends or frames is None:
            return None
        until = min(self._ends[0] + AHEAD, frames)
        return replace(self.utterance, until=until, known=self._latents)

    def add(self, speech: Speech) -> Tensor:
        """(samples,) that the speech of `next` adds to the sound."""
        begin, end = self._begin * self.hop, self._ends.pop(0)
        self._begin, self._latents = end, speech.latents[: end + CONTEXT]
        fade = min(int(FADE_SECONDS * speech.sample_rate), len(self._last) - begin)
        waveform = part(speech.waveform, 0, self.pieces, speech.sample_rate)
        sound = waveform[begin : end * self.hop].clone()
        if begin and fade > 0:
            ramp = torch.linspace(0, 1, fade)
            sound[:fade] = ramp * sound[:fade] + (1 - ramp) * self._last[begin : begin + fade]
        self._last = waveform
        return sound
