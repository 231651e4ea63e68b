"""How many tokens a subword tokenizer makes of each text: counted once a shard, then kept.

A bound from the text's length would be several times too high: it would leave good samples out and pad
the text of every batch. The counts are in `$XDG_CACHE_HOME/titan-tts/token_counts/<tokenizer>/<shard>`,
named by what they depend on, the tokenizer's fingerprint and the shard's digest; a file that is missing
or damaged is made again. Each is an .npy array of unsigned integers and, behind it, its XXH3 hash.
"""

import io
import os
import struct
from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from tqdm import tqdm

from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.files import atomic_file, user_cache_folder

_HASH = struct.Struct("<Q")

# Texts that are in memory at once: enough for a remote store to be asked for many at a time.
_TEXTS_AT_ONCE = 1024


def count_text_tokens(
    dataset: Dataset,
    count: Callable[[Sequence[str]], list[int]],
    fingerprint: str,
    part: tuple[int, int] = (0, 1),
) -> np.ndarray:
    """(n,) int32: tokens of each sample's text.

    A sample whose JSON is damaged since it was indexed has as many as its text has bytes. What is to
    be done about it, the loader knows when it comes to it.

    Args:
        count: tokens of each of some texts.
        fingerprint: of the tokenizer that counts.
        part: (number, count) of processes that start together: each begins with other shards and
            takes over what the others have made meanwhile. The first shows progress.
    """
    number, parts = part
    shards = len(dataset.tar_paths)
    first = np.searchsorted(dataset.shard, np.arange(shards + 1))
    counts = np.zeros(len(dataset), np.int32)
    folder = os.path.join(user_cache_folder("token_counts"), fingerprint)
    with tqdm(
        desc="counting tokens", total=len(dataset), unit="text", delay=2.0, disable=number > 0
    ) as bar:
        for turn in range(shards):
            shard = (shards * number // parts + turn) % shards
            samples = range(first[shard], first[shard + 1])
            path = os.path.join(folder, dataset.shard_digests[shard][:32] + ".npy")
            kept = _read(path, len(samples))
            if kept is not None:
                counts[samples.start : samples.stop] = kept
                bar.update(len(samples))
                continue
            damaged = False
            for start in range(samples.start, samples.stop, _TEXTS_AT_ONCE):
                chunk = range(start, min(start + _TEXTS_AT_ONCE, samples.stop))
                texts, whole = _texts(dataset, chunk)
                counts[chunk.start : chunk.stop] = np.where(
                    whole, count(texts), dataset.text_bytes[chunk.start : chunk.stop]
                )
                damaged |= not all(whole)
                bar.update(len(chunk))
            if not damaged:  # a shard that is restored has the same digest
                _write(path, counts[samples.start : samples.stop])
    return counts


def _texts(dataset: Dataset, samples: Sequence[int]) -> tuple[list[str], list[bool]]:
    """The texts, and for each whether it could be read; one that could not is empty."""
    try:
        return [metadata["text"] for metadata in dataset.metadata_of(samples)], [True] * len(
            samples
        )
    except CorruptSampleError:
        if len(samples) == 1:
            return _text_again(dataset, samples[0])
    # Which ones: by halves, as most of a chunk is sound.
    middle = len(samples) // 2
    halves = [_texts(dataset, half) for half in (samples[:middle], samples[middle:])]
    return halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]


def _text_again(dataset: Dataset, sample: int) -> tuple[list[str], list[bool]]:
    """What the cache or the way here made of a remote sample, perhaps: once more, from its origin."""
    if dataset.is_remote(sample):
        dataset.forget(sample)
        try:
            return [dataset.metadata(sample)["text"]], [True]
        except CorruptSampleError:
            pass
    return [""], [False]


def _write(path: str, counts: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, counts.astype(np.min_scalar_type(int(counts.max(initial=0)))))
    data = buffer.getvalue()
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_file(path) as file:
            file.write(data + _HASH.pack(xxhash.xxh3_64_intdigest(data)))
    except OSError:
        pass  # nowhere to keep it is no failure: it is counted again at the next start


def _read(path: str, samples: int) -> np.ndarray | None:
    """The kept counts (samples,), or None where there are none or they are damaged."""
    try:
        with open(path, "rb") as file:
            stored = file.read()
    except OSError:
        return None
    data, digest = stored[: -_HASH.size], stored[-_HASH.size :]
    if digest != _HASH.pack(xxhash.xxh3_64_intdigest(data)):
        return None
    counts = np.load(io.BytesIO(data), allow_pickle=False)
    return counts if counts.shape == (samples,) else None
