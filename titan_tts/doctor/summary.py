"""Statistics of a dataset from its indexes and, for rare characters, some of its texts, as plain JSON: no array is read."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_tts.doctor.scan import choose_samples
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.members import LABELS
from torchtitan.models.dit_tts.files import is_remote
from torchtitan.models.dit_tts.text.token_counts import read_texts

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
COUNTED_TEXTS = 20_000
RARE = 0.01
"""Fraction of the texts below which a character is listed, but for letters and digits of ASCII"""


def summarize(
    dataset: Dataset, paths: Sequence[str], frames_per_second: float, top: int = 10
) -> dict[str, Any]:
    """Counts, lengths and labels of a dataset; the `top` values of a label are listed."""
    frames = dataset.frames.astype(np.int64)
    seconds = np.maximum(frames, 1) / frames_per_second
    references = dataset.reference_frames
    return {
        "path": list(paths),
        "fingerprint": dataset.fingerprint,
        "samples": len(dataset),
        "shards": len(dataset.tar_paths),
        "bytes": int(sum(dataset.tar_bytes)),
        "hours": _number(frames.sum() / frames_per_second / 3600),
        "reference_hours": _number(references.sum(dtype=np.int64) / frames_per_second / 3600),
        "frames_per_second": frames_per_second,
        "latent_channels": dataset.latent_channels,
        "problems": len(dataset.problems),
        "frames": distribution(frames),
        "reference_frames": {
            **distribution(references[references > 0]),
            "without": int((references == 0).sum()),
        },
        "text_chars": distribution(dataset.text_chars),
        "chars_per_second": distribution(dataset.text_chars / seconds),
        "characters": len(dataset.characters),
        "rare_characters": rare_characters(dataset),
        "labels": {name: _label(dataset, name, frames_per_second, top) for name in LABELS},
    }


def rare_characters(dataset: Dataset) -> dict[str, int]:
    """Character -> how many texts have it, the rarest first, counted in at most `COUNTED_TEXTS` of the local shards, of which
    some may have none; {} where all are remote."""
    local = np.array([not is_remote(path) for path in dataset.tar_paths], bool)
    samples = np.flatnonzero(local[dataset.shard])
    chosen = samples[choose_samples(len(samples), COUNTED_TEXTS)].tolist()
    if not chosen:
        return {}
    found, *_ = read_texts(dataset, chosen)
    counts = Counter(character for text in found for character in set(text or ""))
    few = (c for c in dataset.characters if counts[c] < max(2, RARE * len(chosen)))
    listed = [c for c in few if not (c.isascii() and c.isalnum())]
    return {c: counts[c] for c in sorted(listed, key=lambda c: (counts[c], c))}


def distribution(values: np.ndarray) -> dict[str, Any]:
    """Extremes, mean and quantiles."""
    if not len(values):
        return {"min": None, "max": None, "mean": None, "quantiles": {}}
    quantiles = np.quantile(values, QUANTILES)
    return {
        "min": _number(values.min()),
        "max": _number(values.max()),
        "mean": _number(values.mean(dtype=np.float64)),
        "quantiles": {
            str(fraction): _number(value)
            for fraction, value in zip(QUANTILES, quantiles, strict=True)
        },
    }


def _label(dataset: Dataset, name: str, frames_per_second: float, top: int) -> dict[str, Any]:
    codes, values = dataset.labels(name)
    known = codes >= 0
    samples = np.bincount(codes[known], minlength=len(values))
    frames = np.bincount(codes[known], weights=dataset.frames[known], minlength=len(values))
    hours = frames / frames_per_second / 3600
    total = max(float(hours.sum()), 1e-12)
    return {
        "count": int((samples > 0).sum()),
        "without": int((codes < 0).sum()),
        "most": [
            {
                "value": values[number],
                "samples": int(samples[number]),
                "hours": _number(hours[number]),
                "fraction": _number(hours[number] / total),
            }
            for number in np.argsort(-hours, kind="stable")[:top]
        ],
    }


def _number(value: float) -> float | int:
    """A plain number of at most nine significant digits, an int where it is whole."""
    value = float(value)
    return int(value) if value.is_integer() else float(f"{value:.9g}")
