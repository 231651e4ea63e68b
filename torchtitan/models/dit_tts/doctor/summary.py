"""Statistics of a dataset from its indexes alone: no array and no JSON is read.

Everything returned is plain JSON: the commands print it, the page shows it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.data.dataset import Dataset

LABELS = ("speaker", "language", "quality", "class")
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
HISTOGRAM_BINS = 24
# Distinct characters that are listed; a Chinese corpus has thousands.
MAX_CHARACTERS = 400


def summarize(
    dataset: Dataset, paths: Sequence[str], frames_per_second: float, top: int = 10
) -> dict[str, Any]:
    """Counts, lengths and labels of a dataset.

    Args:
        paths: the entries of ``[data] path``, as the user gave them.
        frames_per_second: latent frames a second of audio.
        top: values of each label that are listed at either end.
    """
    frames = dataset.frames.astype(np.int64)
    seconds = np.maximum(frames, 1) / frames_per_second
    references = dataset.reference_frames
    return {
        "path": list(paths),
        "fingerprint": dataset.fingerprint,
        "samples": len(dataset),
        "shards": len(dataset.tar_paths),
        "bytes": int(sum(dataset.tar_bytes)),
        "hours": _hours(frames.sum(), frames_per_second),
        "reference_hours": _hours(references.sum(dtype=np.int64), frames_per_second),
        "frames_per_second": frames_per_second,
        "latent_channels": dataset.latent_channels,
        "dtype": _dtypes(dataset),
        "problems": len(dataset.problems),
        "frames": distribution(frames),
        "reference_frames": {
            **distribution(references[references > 0]),
            "without": int((references == 0).sum()),
        },
        "text_bytes": distribution(dataset.text_bytes),
        "text_chars": distribution(dataset.text_chars),
        "chars_per_second": distribution(dataset.text_chars / seconds),
        "characters": {
            "count": len(dataset.characters),
            "first": dataset.characters[:MAX_CHARACTERS],
        },
        "labels": {name: _label(dataset, name, frames_per_second, top) for name in LABELS},
        "sources": _sources(dataset, paths, frames_per_second),
    }


def distribution(values: np.ndarray) -> dict[str, Any]:
    """Total, extremes, mean, quantiles and an evenly spaced histogram from 0 to the largest."""
    if not len(values):
        return {
            "total": 0,
            "min": None,
            "max": None,
            "mean": None,
            "quantiles": {},
            "histogram": {"edges": [], "counts": []},
        }
    quantiles = np.quantile(values, QUANTILES)
    counts, edges = np.histogram(
        values, bins=HISTOGRAM_BINS, range=(0, max(float(values.max()), 1.0))
    )
    return {
        "total": _number(values.sum(dtype=np.float64)),
        "min": _number(values.min()),
        "max": _number(values.max()),
        "mean": _number(values.mean(dtype=np.float64)),
        "quantiles": {
            str(share): _number(value) for share, value in zip(QUANTILES, quantiles, strict=True)
        },
        "histogram": {
            "edges": [_number(edge) for edge in edges],
            "counts": [int(count) for count in counts],
        },
    }


def shard_table(
    dataset: Dataset, frames_per_second: float, problems_by_path: dict[str, int]
) -> list[dict[str, Any]]:
    """One row a shard: path, bytes, samples, hours, problems."""
    shards = len(dataset.tar_paths)
    samples = np.bincount(dataset.shard, minlength=shards)
    frames = np.bincount(dataset.shard, weights=dataset.frames, minlength=shards)
    return [
        {
            "path": path,
            "bytes": int(dataset.tar_bytes[number]),
            "samples": int(samples[number]),
            "hours": _hours(frames[number], frames_per_second),
            "problems": problems_by_path.get(path, 0),
        }
        for number, path in enumerate(dataset.tar_paths)
    ]


def hours_by_label(
    dataset: Dataset, name: str, frames_per_second: float
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(values, samples of each, hours of each) of a label, in the order of its values."""
    codes, values = dataset.labels(name)
    known = codes >= 0
    samples = np.bincount(codes[known], minlength=len(values))
    frames = np.bincount(codes[known], weights=dataset.frames[known], minlength=len(values))
    return list(values), samples, frames / frames_per_second / 3600


def _label(dataset: Dataset, name: str, frames_per_second: float, top: int) -> dict[str, Any]:
    codes, _ = dataset.labels(name)
    values, samples, hours = hours_by_label(dataset, name, frames_per_second)
    total = max(float(hours.sum()), 1e-12)
    order = np.argsort(-hours, kind="stable")

    def rows(chosen: np.ndarray) -> list[dict[str, Any]]:
        return [
            {
                "value": values[number],
                "samples": int(samples[number]),
                "hours": _number(hours[number]),
                "share": _number(hours[number] / total),
            }
            for number in chosen
        ]

    return {
        "count": int((samples > 0).sum()),
        "without": int((codes < 0).sum()),
        "most": rows(order[:top]),
        "least": rows(order[top:][::-1][:top]),
    }


def _sources(
    dataset: Dataset, paths: Sequence[str], frames_per_second: float
) -> list[dict[str, Any]]:
    samples = np.bincount(dataset.source, minlength=len(paths))
    frames = np.bincount(dataset.source, weights=dataset.frames, minlength=len(paths))
    return [
        {
            "path": path,
            "samples": int(samples[number]),
            "hours": _hours(frames[number], frames_per_second),
        }
        for number, path in enumerate(paths)
    ]


def _dtypes(dataset: Dataset) -> dict[str, int]:
    item_bytes = dataset.latents_item_bytes
    names = {2: "float16", 4: "float32"}
    return {
        name: int((item_bytes == size).sum())
        for size, name in names.items()
        if (item_bytes == size).any()
    }


def _hours(frames: float, frames_per_second: float) -> float:
    return _number(float(frames) / frames_per_second / 3600)


def _number(value: float) -> float | int:
    """A plain number of at most nine significant digits, whole where it is whole."""
    value = float(value)
    return int(value) if value.is_integer() else float(f"{value:.9g}")
