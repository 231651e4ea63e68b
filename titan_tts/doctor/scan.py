"""One pass over the data: every array and JSON is read once and leaves a few numbers.

Reading a sample checks its bytes against the index's hashes. Threads read chunks of samples in the
order in which they lie in the shards. Memory holds `ROW.itemsize` bytes per sample and, per thread,
one sample (a chunk where it is fetched from a URL), however large the dataset is.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.data.leak import is_leak
from torchtitan.models.dit_tts.data.members import LABELS, VERBATIM
from torchtitan.models.dit_tts.files import nfc

CHUNK_SAMPLES = 64
# Messages of samples that could not be read are kept up to this number; all are counted.
MAX_MESSAGES = 1000

_UNSPOKEN = re.compile(
    r"<[^<>]{1,60}>|\[[^][]{1,60}\]|\{[^{}]{1,60}\}|\*\w[^*]{0,60}\*"
    r"|\([^\W\d_]+( [^\W\d_]+)?\)|(?:^|[.?!…]\s*)\([^()]{1,60}\)\s*$"
)

NOT_READ, READ, CORRUPT = range(3)

# One row per sample.
ROW = np.dtype(
    [
        ("state", "u1"),  # NOT_READ, READ or CORRUPT; the other columns hold where it is READ
        ("constant", "?"),  # all frames of the latents are alike
        ("constant_reference", "?"),
        ("leak", "?"),  # the reference has frames of the target, or its key
        ("blank_text", "?"),  # nothing but white space
        ("decomposed", "?"),  # see the function
        ("unspoken", "?"),  # likewise
        ("std", "f4"),  # over all frames and channels
        ("peak", "f4"),  # maximum magnitude
        ("clipped", "f4"),  # fraction of the recording's samples at full scale; 0: not told
        ("duration", "f8"),  # target_duration in seconds; NaN: no positive number
    ]
)


@dataclass(frozen=True)
class Measurements:
    """The result of a pass."""

    rows: np.ndarray  # (n,) `ROW`, one per sample of the dataset
    messages: dict[int, str]  # sample -> why it could not be read, for the first `MAX_MESSAGES`

    def where(self, mask: np.ndarray) -> np.ndarray:
        """Numbers of the samples that were read and for which `mask` (n,) holds."""
        return np.flatnonzero((self.rows["state"] == READ) & mask)


def choose_samples(count: int, max_samples: int) -> np.ndarray:
    """(m,) ascending numbers: all, or `max_samples` at even distances (0: all)."""
    chosen = max_samples if 0 < max_samples < count else count
    return np.linspace(0, count - 1, chosen).astype(np.int64)


def measure(
    dataset: Dataset,
    samples: np.ndarray,
    threads: int,
    progress: Callable[[int], Any] = lambda count: None,
) -> Measurements:
    """Read `samples` with `threads` threads; `progress` is called with the number of new ones."""
    found = Measurements(np.zeros(len(dataset), ROW), {})
    starts = range(0, len(samples), CHUNK_SAMPLES)
    chunks = [samples[start : start + CHUNK_SAMPLES] for start in starts]
    pool = ThreadPoolExecutor(threads, thread_name_prefix="doctor")
    try:
        results = pool.map(lambda chunk: _measure_chunk(dataset, chunk), chunks)
        for chunk, part in zip(chunks, results, strict=True):
            found.rows[chunk] = part.rows
            if len(found.messages) < MAX_MESSAGES:
                found.messages.update(part.messages)
            progress(len(chunk))
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _measure_chunk(dataset: Dataset, samples: np.ndarray) -> Measurements:
    numbers, found = samples.tolist(), Measurements(np.zeros(len(samples), ROW), {})
    fetched = dataset.fetch(numbers).samples
    for row, sample in zip(found.rows, numbers, strict=True):
        try:
            loaded = dataset.load(sample, fetched=fetched.get(sample))
        except CorruptSampleError as error:
            row["state"], found.messages[sample] = CORRUPT, str(error)
            continue
        row["state"] = READ
        latents, reference, metadata = loaded.latents, loaded.reference, loaded.metadata
        row["std"] = latents.std(dtype=np.float64)  # squares of large values overflow in float32
        row["peak"] = np.abs(latents).max()
        row["constant"] = _is_constant(latents)
        row["constant_reference"] = len(reference) > 0 and _is_constant(reference)
        own_key = len(reference) > 0 and metadata.get("reference_key") == dataset.key(sample)
        row["leak"] = own_key or is_leak(reference, latents)
        _measure_metadata(row, metadata)
    return found


def _is_constant(array: np.ndarray) -> bool:
    """True if all frames of (T, C) are alike; of one frame: all its channels."""
    frame = array[0]
    varies = len(array) == 1 and (len(frame) == 1 or (frame != frame[0]).any())
    return not (varies or (array != frame).any())


def decomposed(metadata: dict[str, Any]) -> str:
    """The first word of a sample's texts and labels that is not NFC; empty: there is none."""
    values = (metadata.get(name) for name in ("text", VERBATIM, *LABELS))
    words = (word for value in values if isinstance(value, str) for word in value.split())
    return next((word for word in words if nfc(word) != word), "")


def unspoken(metadata: dict[str, Any]) -> str:
    """The first part of a sample's text that is written like <beep>, [S1], {pause}, *sighs* or (laughs); empty: there is
    none. Other words in round brackets are often read aloud."""
    found = _UNSPOKEN.search(metadata["text"])
    return found[0] if found else ""


def _measure_metadata(row: np.void, metadata: dict[str, Any]) -> None:
    text, duration = metadata["text"], metadata.get("target_duration", 0)
    row["blank_text"] = not text.strip()
    row["decomposed"] = bool(decomposed(metadata))
    row["unspoken"] = bool(unspoken(metadata))
    clipped = metadata.get("clipped")  # by prepare or collect
    row["clipped"] = clipped if type(clipped) is float else 0
    is_number = type(duration) in (int, float) and 0 < duration < np.inf
    row["duration"] = duration if is_number else np.nan
