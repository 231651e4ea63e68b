"""Which conditioning tokens a sample loses in training: a pure function of its place in the stream.

The same scheme as `flow.randomness` (SplitMix64, Steele, Lea and Flood 2014), bit for bit, on numpy:
the loader's threads draw it, and torch would start a thread pool in each of them.
"""

from collections.abc import Sequence

import numpy as np

from torchtitan.models.dit_tts.text.vocabulary import FIELDS

# Apart from the objective's streams (from 0) and the sampler's (100). By name, so that a field is
# dropped from the same samples whichever other fields there are.
_STREAMS = {name: 200 + number for number, name in enumerate(FIELDS)}

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def dropped_conditions(
    seed: int, global_batch: int, rows: np.ndarray, fields: Sequence[str], share: float
) -> np.ndarray:
    """Which conditioning tokens are to be the unknown one.

    Args:
        seed: the run's seed.
        global_batch: the global batch's place in training.
        rows: (B,) rows in the global batch.
        fields: names from FIELDS.
        share: the probability of each, from 0 to 1.

    Returns:
        (B, len(fields)) bool.
    """
    if not share:
        return np.zeros((len(rows), len(fields)), bool)
    keys = np.zeros(len(fields), np.uint64)
    for column, name in enumerate(fields):
        key = seed & _MASK
        for part in (_STREAMS[name], global_batch):
            key = _mix_int(_plus_gamma(key) ^ _mix_int(_plus_gamma(part)))
        keys[column] = _plus_gamma(key)
    row_hashes = _mix(np.asarray(rows).astype(np.uint64) + np.uint64(_GAMMA))
    bits = _mix(_mix(keys ^ row_hashes[:, None]) + np.uint64(_GAMMA))
    return ((bits >> np.uint64(12)) + 0.5) * 2.0**-52 < share


def _plus_gamma(x: int) -> int:
    return (x + _GAMMA) & _MASK


def _mix_int(x: int) -> int:
    """SplitMix64's finaliser of one number."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix(x: np.ndarray) -> np.ndarray:
    """The same of an array of uint64; numpy's integers wrap around in arrays without a warning."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))
