"""Finds where in a recording each character of its text is spoken, by a forced alignment.

A hidden Markov model has one state per character of the text, in its order, and one before and one after them. A state's
frames are drawn from the Gaussian of its character, with a diagonal covariance, over latents that are normalised per
recording. It is trained on the recordings themselves by alternating the best path (Viterbi) and the Gaussians of its
frames (segmental k-means, Juang and Rabiner 1990): no phones, no dictionary, no trained recognizer. At 25 frames per
second a character may be shorter than a frame, so a path may leave out one or two.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchtitan.models.dit_tts.bounded import read_arrays
from torchtitan.models.dit_tts.errors import reading
from torchtitan.models.dit_tts.files import write_atomic

if TYPE_CHECKING:  # what speaks by onnxruntime reads an aligner without torch
    from torchtitan.models.dit_tts.data.dataset import Dataset

ALIGNER_FILE = "aligner.npz"

EDGE, UNKNOWN, FIRST_SYMBOL = 0, 1, 2
"""states of what is before and after the text, of characters that the training texts lack, and of the symbols"""

MIN_FRAMES = 0.05
"""of a character in a position: one that takes no frame still keeps its place in the order"""

_MAX_RECORDINGS, _MAX_FRAMES = 3000, 500_000  # from which the states are learned: 5.5 hours, 0.5 GB
_ITERATIONS = 5
_PRIOR_FRAMES = 50  # of all recordings, by whose variance that of a symbol is smoothed
_MIN_VARIANCE = 0.05
# Neighbouring frames are much alike, and the channels depend on each other: their likelihoods are not independent.
_LIKELIHOOD_SCALE = 0.3
_SKIP_COST = 2.0  # for each character that a path leaves out
_MAX_STEP = 3
_IMPOSSIBLE = np.float32(-1e9)

# Neighbours by their distance, from no context to two on each side.
_CONTEXTS = ((), (0,), (0, 1), (-1, 0, 1), (-1, 0, 1, 2), (-2, -1, 0, 1, 2))
_WIDEST = 2
_PRIOR_EXAMPLES = 8
# A prime above the number of states; the keys of the widest contexts wrap around without meeting.
_BASE = np.uint64(1_114_127)


def folded(text: str) -> list[str]:
    """The characters of a text without their case, which is not heard. As many as the text has."""
    return [c.lower() if len(c.lower()) == 1 else c for c in text]


def normalised(latents: np.ndarray) -> np.ndarray:
    """(T, C) float32 of zero mean and unit deviation per channel."""
    latents = latents.astype(np.float32)
    return (latents - latents.mean(0)) / (latents.std(0) + 1e-3)


@dataclass(frozen=True)
class CharacterLengths:
    """The frames that a character takes, by the characters around it: means over aligned texts that back off. The mean
    of each wider context is taken of what the narrower ones leave unexplained and shrunk towards 0 by the number of its
    examples, so that a context that was seen once says little and one that was never seen nothing."""

    keys: np.ndarray
    """(n,) uint64, ascending, of contexts"""

    values: np.ndarray
    """(n,) float32 frames that each adds"""

    def expected(self, states: np.ndarray) -> np.ndarray:
        """(n,) float64 frames of each of the states (n,) of a text; may be negative."""
        total = np.zeros(len(states))
        for number in range(len(_CONTEXTS)):
            keys = _keys(states, number)
            index = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
            total += np.where(self.keys[index] == keys, self.values[index], 0.0)
        return total


def _keys(states: np.ndarray, number: int) -> np.ndarray:
    """(n,) uint64: the key of context `number` at each of the states (n,)."""
    padded = np.pad(states, _WIDEST).astype(np.uint64)
    keys = np.full(len(states), number + 1, np.uint64)
    for distance in _CONTEXTS[number]:
        keys = keys * _BASE + padded[_WIDEST + distance :][: len(states)]
    return keys


def fit_lengths(states: Sequence[np.ndarray], frames: Sequence[np.ndarray]) -> CharacterLengths:
    """Lengths by the states (n,) of some texts and the frames (n,) that each took."""
    left = np.concatenate(frames).astype(np.float64)
    keys, values = [], []
    for number in range(len(_CONTEXTS)):
        of_all = np.concatenate([_keys(each, number) for each in states])
        unique, index, counts = np.unique(of_all, return_inverse=True, return_counts=True)
        mean = np.bincount(index, left) / (counts + (_PRIOR_EXAMPLES if number else 0))
        left -= mean[index]
        keys.append(unique)
        values.append(mean)
    order = np.argsort(all_keys := np.concatenate(keys))
    return CharacterLengths(all_keys[order], np.concatenate(values)[order].astype(np.float32))


@dataclass(frozen=True)
class Aligner:
    """Symbols, the Gaussians of the states (symbols + 2, C), and how long each symbol is without a recording."""

    symbols: str
    means: np.ndarray
    variances: np.ndarray
    lengths: CharacterLengths

    @cached_property
    def _state_of(self) -> dict[str, int]:
        return {symbol: FIRST_SYMBOL + i for i, symbol in enumerate(self.symbols)}

    @cached_property
    def _weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Factors of x², x and 1 in each state's log-likelihood, scaled; constants that all states share are left out."""
        precision = _LIKELIHOOD_SCALE / self.variances
        square = (self.means**2 * precision + _LIKELIHOOD_SCALE * np.log(self.variances)).sum(1)
        return -0.5 * precision, self.means * precision, -0.5 * square

    def states(self, text: str) -> np.ndarray:
        """(characters + 2,) int64: the text between the edges."""
        found = (self._state_of.get(c, UNKNOWN) for c in folded(text))
        return np.array([EDGE, *found, EDGE], np.int64)

    def path(self, text: str, latents: np.ndarray) -> np.ndarray:
        """(T,) int64: for each frame of latents (T, C), the index in `states(text)` of what is spoken. A text too
        long for its recording is spread evenly."""
        x, states = normalised(latents), self.states(text)
        ofsquares, ofvalues, constant = (each[states] for each in self._weights)
        emissions = (x**2) @ ofsquares.T + x @ ofvalues.T + constant
        return _best_path(emissions)

    def frames(self, text: str, latents: np.ndarray) -> np.ndarray:
        """(characters + 2,) int64: how many frames each character takes, and what is before and after them."""
        return np.bincount(self.path(text, latents), minlength=len(text) + 2)

    def expected_frames(self, text: str) -> np.ndarray:
        """`frames` of a text without a recording, float64; those of a character may be below 0."""
        return self.lengths.expected(self.states(text))

    def save(self, folder: Path) -> None:
        """Writes `ALIGNER_FILE` to a folder."""
        content = io.BytesIO()
        np.savez(
            content,
            symbols=np.array(self.symbols),
            means=self.means,
            variances=self.variances,
            length_keys=self.lengths.keys,
            length_values=self.lengths.values,
        )
        write_atomic(folder / ALIGNER_FILE, content.getvalue())


def unit_spans(units: Sequence[int]) -> np.ndarray:
    """(tokens, 2) float64: where each token begins and ends, in characters, of characters that have so many `units` of
    one token each; several divide their character."""
    ends = np.cumsum([0, *units])
    edges = np.interp(np.arange(ends[-1] + 1), ends, np.arange(len(ends)))
    return np.stack([edges[:-1], edges[1:]], 1)


def token_positions(frames: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """(tokens,) float32 in (0, 1): where in the speech the middle of each token is, -1 for those without a character.
    `frames`: (characters + 2,) as `Aligner.frames`; `spans`: (tokens, 2), where each begins and ends, in characters."""
    ends = np.maximum(frames, MIN_FRAMES).cumsum()
    begin, end = spans.T
    of_character = np.arange(len(ends) - 1)
    first, last = (np.interp(each, of_character, ends[:-1]) for each in (begin, end))
    return np.where(begin < end, (first + last) / 2 / ends[-1], -1.0).astype(np.float32)


def _spread(frames: int, states: int) -> np.ndarray:
    return ((np.arange(frames) + 0.5) * (states / frames)).astype(np.int64)


def _best_path(emissions: np.ndarray) -> np.ndarray:
    """The path of the highest sum of emissions (T, S), which begins in the first state or the second, ends in the
    last or the one before, and advances by up to `_MAX_STEP` states per frame."""
    frames, states = emissions.shape
    scores = np.empty((frames, states + _MAX_STEP), np.float32)
    scores[:, :_MAX_STEP] = _IMPOSSIBLE  # of states before the first, so that no step needs a check
    scores[0, _MAX_STEP:] = _IMPOSSIBLE
    scores[0, _MAX_STEP : _MAX_STEP + 2] = emissions[0, :2]
    moved = np.empty(states, np.float32)
    for t in range(1, frames):
        before, best = scores[t - 1], scores[t, _MAX_STEP:]
        np.maximum(before[3:], before[2:-1], out=best)
        for step in range(2, _MAX_STEP + 1):
            np.subtract(before[3 - step : -step], (step - 1) * _SKIP_COST, out=moved)
            np.maximum(best, moved, out=best)
        np.add(best, emissions[t], out=best)
    state = states - 1 - int(scores[-1, -2] > scores[-1, -1])
    if scores[-1, state + _MAX_STEP] < _IMPOSSIBLE / 2:
        return _spread(frames, states)
    path = np.empty(frames, np.int64)
    costs = np.array([2 * _SKIP_COST, _SKIP_COST, 0.0, 0.0], np.float32)
    for t in range(frames - 1, 0, -1):
        path[t] = state
        came_from = scores[t - 1, state : state + _MAX_STEP + 1] - costs
        state -= _MAX_STEP - int(came_from.argmax())
    path[0] = state
    return path


def load_aligner(folder: Path) -> Aligner:
    """The aligner that `Aligner.save` wrote to a run's folder or an exported one. The file has a checksum."""
    path = folder / ALIGNER_FILE
    with reading(
        path, "restore the file that the run wrote, as the weights depend on the places of the text"
    ):
        file = read_arrays(path)
        lengths = CharacterLengths(file["length_keys"], file["length_values"])
        aligner = Aligner(str(file["symbols"]), file["means"], file["variances"], lengths)
        states = len(aligner.symbols) + FIRST_SYMBOL
        tables = aligner.means, aligner.variances
        finite = all(np.isfinite(each).all() for each in (*tables, lengths.values))
        fits = {each.shape for each in tables} == {(states, aligner.means.shape[-1])}
        fits &= lengths.keys.ndim == 1 and lengths.keys.shape == lengths.values.shape
        if not (fits and finite and (aligner.variances > 0).all()):
            raise ValueError("its tables do not fit each other, or are not finite")
        return aligner


def choose_recordings(
    dataset: "Dataset", max_frames: int, total_frames: int = _MAX_FRAMES
) -> list[tuple[str, np.ndarray]]:
    """Texts and latents from which an aligner is learned: an even selection, of about `total_frames`, of recordings
    that are not longer than `max_frames`, without the corrupt ones; may be empty."""
    from torchtitan.models.dit_tts.data.dataset import CorruptSampleError

    fitting = np.flatnonzero((dataset.frames <= max_frames) & (dataset.text_chars > 0))
    affordable = 1 + total_frames * len(fitting) // max(1, int(dataset.frames[fitting].sum()))
    count = min(len(fitting), _MAX_RECORDINGS, affordable)
    chosen = np.unique(np.linspace(0, len(fitting) - 1, count).astype(np.int64))
    samples, found = fitting[chosen].tolist(), []
    fetched = dataset.fetch(samples).samples
    for sample in samples:
        try:
            loaded = dataset.load(sample, fetched=fetched.get(sample))
        except CorruptSampleError:
            continue
        found.append((loaded.metadata["text"], loaded.latents))
    return found


def fit_aligner(recordings: Sequence[tuple[str, np.ndarray]]) -> Aligner:
    """The aligner of some recordings: text and latents (T, C) of each."""
    from tqdm import tqdm

    texts = [text for text, _ in recordings]
    symbols = "".join(sorted({c for text in texts for c in folded(text)}))
    everything = np.concatenate([normalised(latents) for _, latents in recordings])
    overall = everything.mean(0), everything.var(0)
    count = len(symbols) + FIRST_SYMBOL
    nothing = CharacterLengths(np.zeros(1, np.uint64), np.zeros(1, np.float32))
    means, variances = (np.tile(each, (count, 1)) for each in overall)
    aligner = Aligner(symbols, means, variances, nothing)
    states = [aligner.states(text) for text in texts]
    paths = [
        _spread(len(latents), len(of)) for (_, latents), of in zip(recordings, states, strict=True)
    ]
    for iteration in range(_ITERATIONS):
        if iteration:
            bar = tqdm(recordings, f"aligning texts, pass {iteration}", unit="text", delay=2.0)
            paths = [aligner.path(text, latents) for text, latents in bar]
        frame_states = np.concatenate([of[path] for of, path in zip(states, paths, strict=True)])
        order = np.argsort(frame_states, kind="stable")
        bounds = np.searchsorted(frame_states[order], np.arange(count + 1))
        means, variances = (np.tile(each, (count, 1)) for each in overall)
        for state in range(count):
            own = everything[order[bounds[state] : bounds[state + 1]]]
            if len(own):
                share = len(own) / (len(own) + _PRIOR_FRAMES)
                means[state] = own.mean(0)
                variances[state] = share * own.var(0) + (1 - share) * overall[1]
        aligner = Aligner(symbols, means, np.maximum(variances, _MIN_VARIANCE), nothing)
    frames = [aligner.frames(text, latents) for text, latents in recordings]
    return replace(aligner, lengths=fit_lengths(states, frames))
