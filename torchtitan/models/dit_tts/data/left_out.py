"""Sentences about the samples that a run or a preparation leaves out: minutes, and the longest by name."""

from collections.abc import Iterable

import numpy as np

from torchtitan.models.dit_tts.data.dataset import Dataset

WORST = 5
"""recordings that are named"""


def left_out_words(
    unit: str,
    counts: tuple[int, int],
    seconds: tuple[float, float],
    longest: Iterable[tuple[str, float]],
) -> str:
    """`counts` and `seconds`: of what is left out, and of everything. `longest`: names and seconds."""
    named = ", ".join(f"{name} ({length:.1f} s)" for name, length in longest)
    lost, everything = seconds
    return (
        f"left out: {counts[0]:,} of {counts[1]:,} {unit}, {lost / 60:,.1f} of {everything / 60:,.1f} minutes "
        f"({lost / max(everything, 1e-9):.1%})" + (f", the longest: {named}" if named else "")
    )


def samples_left_out(dataset: Dataset, left: np.ndarray, frames_per_second: float) -> str:
    """Return a sentence about the samples where `left` (n,) is true; else empty."""
    out = np.flatnonzero(left)
    if not len(out):
        return ""
    seconds = dataset.frames / frames_per_second
    worst = out[np.argsort(-seconds[out], kind="stable")[:WORST]]
    return left_out_words(
        "samples",
        (len(out), len(seconds)),
        (float(seconds[out].sum()), float(seconds.sum())),
        [(dataset.sample_id(int(one)), float(seconds[one])) for one in worst],
    )
