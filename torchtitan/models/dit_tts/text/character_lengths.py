"""The frames that a character takes, by the characters around it: means over aligned texts that back off.

The mean of each wider context is taken of what the narrower ones leave unexplained and shrunk towards 0 by the
number of its examples, so that a context that was seen once says little and one that was never seen nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Neighbours by their distance, from no context to two on each side.
_CONTEXTS = ((), (0,), (0, 1), (-1, 0, 1), (-1, 0, 1, 2), (-2, -1, 0, 1, 2))
_WIDEST = 2
_PRIOR_EXAMPLES = 8
# A prime above the number of states; the keys of the widest contexts wrap around without meeting.
_BASE = np.uint64(1_114_127)


@dataclass(frozen=True)
class CharacterLengths:
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
