"""Recordings that begin or end in the middle of speech: they were cut, and their text says more than is heard.

An alignment of some texts tells which frames are speech. Their linear discriminant says how much like speech the
first and the last frame of a recording are: whole recordings seldom begin and hardly ever end so. Those that were
trimmed tightly may, but all their letters have their time, which those of cut ones have not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.models.dit_tts.text.aligner import EDGE, Aligner, fit_aligner

MAX_FRAMES = 100_000
"""of the recordings that all is learned from: some seconds of work"""
# Of fewer recordings, and of less that is no speech, nothing is learned.
_MIN_RECORDINGS = 50
_MIN_EDGE_FRAMES = 50
# Letters at each end whose time is compared; a shorter text has none.
_LETTERS = 4
# Of a frame like speech. At 0.5 are 0 to 2 % of the whole recordings (tightly trimmed ones: up to half of the beginnings), and
# of those without 0.3 s nearly all at the beginning, half at the end.
_LIKE_SPEECH = 0.5


@dataclass(frozen=True)
class SpeechEnds:
    """A discriminant of frames (C,), 1 at the mean of speech and -1 at that of the rest, and lengths of characters."""

    aligner: Aligner
    weights: np.ndarray
    offset: float
    length_of: np.ndarray
    """(states,) mean frames"""

    def cut(self, text: str, latents: np.ndarray) -> tuple[float, float]:
        """(beginning, end) of latents (T, C): the part of their usual time that the outermost letters have where the
        outermost frame is like speech; 0 elsewhere."""
        like_speech = latents[[0, -1]] @ self.weights + self.offset > _LIKE_SPEECH
        letters = np.array([False, *(character.isalnum() for character in text), False])
        if not like_speech.any() or letters.sum() < 2 * _LETTERS:
            return 0.0, 0.0
        frames, states = self.aligner.frames(text, latents), self.aligner.states(text)
        found = [0.0, 0.0]
        for side, step in enumerate((1, -1)):
            if like_speech[side]:
                end = 1 + np.flatnonzero(letters[::step])[_LETTERS - 1]
                usual = self.length_of[states[::step][:end]].sum()
                found[side] = frames[::step][:end].sum() / max(1.0, float(usual))
        return found[0], found[1]


def learn_ends(recordings: Sequence[tuple[str, np.ndarray]]) -> SpeechEnds | None:
    """From text and latents (T, C) of some recordings; None: they are too few or hold nothing but speech."""
    if len(recordings) < _MIN_RECORDINGS:
        return None
    aligner = fit_aligner(recordings)
    frames, speech, edges = [], [], []
    for text, latents in recordings:
        path = aligner.path(text, latents)
        edge = (path == 0) | (path == len(text) + 1)
        frames.append(np.bincount(path, minlength=len(text) + 2))
        speech.append(latents[~edge])
        edges.append(latents[edge])
    of_speech, of_edges = (np.concatenate(each).astype(np.float64) for each in (speech, edges))
    if min(len(of_speech), len(of_edges)) < _MIN_EDGE_FRAMES:
        return None
    spread = np.cov(of_speech.T) + np.cov(of_edges.T)
    spread += 0.01 * np.trace(spread) / len(spread) * np.eye(len(spread)) + 1e-9 * np.eye(
        len(spread)
    )
    apart = of_speech.mean(0) - of_edges.mean(0)
    weights = np.linalg.solve(spread, apart)
    weights *= 2 / max(1e-9, float(weights @ apart))
    offset = -float(weights @ (of_speech.mean(0) + of_edges.mean(0))) / 2
    states = np.concatenate([aligner.states(text) for text, _ in recordings])
    total = np.bincount(states, np.concatenate(frames))
    length_of = total / np.maximum(1, np.bincount(states))
    length_of[EDGE] = 0.0
    return SpeechEnds(aligner, weights, offset, length_of)
