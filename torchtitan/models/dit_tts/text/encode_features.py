"""Makes the files of text features: a shard at a time, in bounded memory, whole files only."""

import errno
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.feature_builder import find_feature_file, places
from torchtitan.models.dit_tts.text.feature_store import (
    FeatureKind,
    remove_abandoned,
    write_feature_file,
)
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder

if TYPE_CHECKING:  # runs with the learned encoder need no tokenizers
    from torchtitan.models.dit_tts.text.hf_tokenizer import SubwordTokenizer

LONGEST_TEXT = 2048
"""tokens; a longer text has no features, as a shard that is one long text would need all memory"""

# Float32 features that are in memory at once; the encoder sorts the texts in them by length.
_BYTES_AT_ONCE = 128 << 20
_TEXTS_AT_ONCE = 1024
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def feature_kind(
    encoder: Encoder, tokenizer: "SubwordTokenizer", source: HFEncoderSpec
) -> FeatureKind:
    """What [encoder] asks for; without the encoder's fingerprint where its weights are not here."""
    fingerprint = source.fingerprint(encoder.dtype) if source.has_weights() else None
    return FeatureKind(
        source.model,
        fingerprint,
        tokenizer.text_fingerprint,
        encoder.dtype,
        encoder.cache_dtype or encoder.dtype,
    )


def longest_text(source: HFEncoderSpec) -> int:
    """Tokens of the longest text that is encoded."""
    return min(LONGEST_TEXT, source.max_tokens or LONGEST_TEXT)


def make_text_features(
    dataset: Dataset,
    shards: Sequence[int],
    encoder: PretrainedTextEncoder,
    tokenizer: "SubwordTokenizer",
    kind: FeatureKind,
    *,
    on_error: str = "raise",
    progress: bool = True,
) -> None:
    """Encodes the texts of some shards; each file appears when its shard is done. What another job
    has made meanwhile is not made again.

    Args:
        shards: numbers of shards of the dataset.
        kind: with the encoder's fingerprint.
        on_error: at a damaged sample "raise", or "skip": it has no features then.
        progress: shows a bar.

    Raises:
        InputError: a damaged sample, features that the stored dtype cannot hold, nowhere to write.
    """
    firsts = np.searchsorted(dataset.shard, shards)
    ends = np.searchsorted(dataset.shard, shards, side="right")
    total = int((ends - firsts).sum())
    with tqdm(
        desc="encoding texts", total=total, unit="text", mininterval=1.0, disable=not progress
    ) as bar:
        for shard, first, end in zip(shards, firsts.tolist(), ends.tolist(), strict=True):
            _make_file(dataset, shard, range(first, end), encoder, tokenizer, kind, on_error, bar)


def _make_file(
    dataset: Dataset,
    shard: int,
    samples: range,
    encoder: PretrainedTextEncoder,
    tokenizer: "SubwordTokenizer",
    kind: FeatureKind,
    on_error: str,
    bar: tqdm,
) -> None:
    if find_feature_file(dataset, shard, kind) is not None:
        bar.update(len(samples))
        return
    ids, ends, readable = _tokenize(dataset, samples, tokenizer, on_error)
    tokens = np.diff(ends, prepend=0).astype(np.int32)
    has_features = readable & (tokens <= longest_text(encoder.source))
    texts = [
        ids[end - count : end]
        for end, count, has in zip(ends.tolist(), tokens.tolist(), has_features, strict=True)
        if has
    ]
    done = bar.n

    def features() -> Iterator[torch.Tensor]:
        for batch in _batches(texts, _BYTES_AT_ONCE // (4 * encoder.width)):
            for one in encoder.encode(batch):
                stored = one.to(kind.torch_dtype)
                if not torch.isfinite(stored).all():
                    raise InputError(
                        f"{dataset.tar_paths[shard]}: features of {kind.model!r} in {kind.encoder_dtype} "
                        f"are not finite in {kind.stored_dtype}; choose another [encoder] cache_dtype "
                        f"or dtype"
                    )
                yield stored
            bar.update(len(batch))

    def write(path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        remove_abandoned(path)
        write_feature_file(
            path,
            kind,
            dataset.shard_digests[shard],
            tokens,
            has_features,
            encoder.width,
            features(),
        )

    tried = places(dataset.tar_paths[shard], dataset.shard_digests[shard])
    for place in tried:
        path = place.path(kind)
        try:
            write(path)
            break
        except OSError as error:
            if place is tried[-1] or error.errno not in _NOT_WRITABLE:
                raise InputError(
                    f"{path}: text features cannot be written ({error.strerror or error}); make room "
                    f"or mend it and start again, the files that are whole are kept"
                ) from error
            bar.update(done - bar.n)
    bar.update(done + len(samples) - bar.n)  # with those that have no features


def _tokenize(
    dataset: Dataset, samples: range, tokenizer: "SubwordTokenizer", on_error: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids of all texts int32, end of each text in them, whether each sample could be read)."""
    parts, ends, readable = [np.zeros(0, np.int32)], [], []
    end = 0
    for first in range(samples.start, samples.stop, _TEXTS_AT_ONCE):
        chunk = range(first, min(first + _TEXTS_AT_ONCE, samples.stop))
        for sample, text in zip(chunk, _texts(dataset, chunk, on_error), strict=True):
            if text is not None:
                try:
                    ids = tokenizer.text_ids(text)
                except InputError as error:
                    raise InputError(f"sample '{dataset.sample_id(sample)}': {error}") from error
                parts.append(np.array(ids, np.int32))
                end += len(ids)
            ends.append(end)
            readable.append(text is not None)
    return np.concatenate(parts), np.array(ends, np.int64), np.array(readable, bool)


def _texts(dataset: Dataset, samples: range, on_error: str) -> list[str | None]:
    """The texts of some samples; None for a damaged one."""
    try:
        return [metadata["text"] for metadata in dataset.metadata_of(samples)]
    except CorruptSampleError:
        if on_error == "raise":
            raise
    texts: list[str | None] = []
    for sample in samples:
        try:
            texts.append(dataset.metadata(sample)["text"])
        except CorruptSampleError:
            texts.append(None)  # the loader meets it again, and counts it
    return texts


def _batches(texts: list[np.ndarray], max_tokens: int) -> Iterator[list[np.ndarray]]:
    """Consecutive texts, at least one and then to so many tokens."""
    batch: list[np.ndarray] = []
    held = 0
    for text in texts:
        if batch and held + len(text) > max_tokens:
            yield batch
            batch, held = [], 0
        batch.append(text)
        held += len(text)
    if batch:
        yield batch
