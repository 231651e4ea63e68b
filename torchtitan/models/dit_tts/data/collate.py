"""Collates samples of a global batch to a padded micro-batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatch, GlobalBatchSampler
from torchtitan.models.dit_tts.data.buckets import BatchPolicy
from torchtitan.models.dit_tts.data.buffer_pool import BufferPool
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.data.references import WORDS, Piece
from torchtitan.models.dit_tts.data.row_loader import Row, RowLoader
from torchtitan.models.dit_tts.errors import InputError

MicroBatch = tuple[dict[str, Any], torch.Tensor]
# A bucket in which so many samples in a row are corrupt ends the run.
_MAX_REPLACEMENTS = 100


class Collator:
    """Makes the micro-batches `(input_dict, labels)`.

    `input_dict`, for B rows of a bucket of shape (T, L, R), holds the arrays of `members.ARRAYS`,
    float32, and the rest:

    ================  ==================  =====================================================
    latents           (B, T, C) float32   zero at padding; cropped to T
    text_ids          (B, L) int64        `tokenizer.pad_id` at padding
    text_mask         (B, L) bool         True at valid tokens
    text_positions       (B, L) float32      `Tokenizer.text_positions` of the ids
    text_features     (B, L, h)           with `features`: in their dtype, zero at padding and
                                          at conditioning tokens
    speaker           (B, R, C) float32   reference latents, R of them from a drawn start if there are
                                          more, zero at padding
    speaker_mask      (B, R) bool         True at valid frames
    frames            (B,) int64          valid latent frames
    sample_id         list of B str       `shard:key`
    global_batch      () int64            number of the global batch, from 0
    row               (B,) int64          row in the global batch
    global_batch_size () int64            G, samples of the global batch
    replaced          int                 corrupt samples that another one replaces
    text_bytes        (B, T) uint8        with `text_bytes`: utf-8 of the texts that can be aligned with
                                          their frames
    aligns            (B,) bool           likewise: which those are
    ctc_lengths       list of B pairs     likewise: valid frames, and bytes (0 of the others)
    ================  ==================  =====================================================

    `labels` (B, T) int64 is 0 at valid frames and IGNORE_INDEX at padding.

    Args:
        row_loader: loads a sample into its row.
        order: of the global batches.
        policy: their buckets.
        max_rows: of a micro-batch of each bucket.
        text_bytes: whether batches have the texts' bytes.
        pin_memory: page-locked tensors, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        row_loader: RowLoader,
        order: GlobalBatchSampler,
        policy: BatchPolicy,
        max_rows: Sequence[int],
        text_bytes: bool,
        pin_memory: bool,
    ):
        self.row_loader = row_loader
        self.order = order
        self.policy = policy
        self.text_bytes = text_bytes
        self.pin_memory = pin_memory
        self._closed = False
        channels, features = row_loader.dataset.latent_channels, row_loader.features
        max_frames = max(size * max(T, R) for size, (T, _, R) in zip(max_rows, policy.shapes))
        widest = max(member.width or channels for member in members.ARRAYS)
        self._memory = BufferPool(max_frames * widest)
        if features is not None:
            max_tokens = max(size * L for size, (_, L, _) in zip(max_rows, policy.shapes))
            self._features_memory = BufferPool(max_tokens * features.width, features.torch_dtype)

    def close(self) -> None:
        """Makes what is under way in threads end at its next row, by a RuntimeError."""
        self._closed = True

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the loader was closed")

    def collate(self, batch: GlobalBatch, first: int, rows: int) -> MicroBatch:
        """So many rows of a global batch, from row `first` on. Thread-safe."""
        dataset, tokenizer = self.row_loader.dataset, self.row_loader.tokenizer
        features_of = self.row_loader.features
        samples = batch.samples[first : first + rows]
        T, L, R = self.policy.shapes[batch.bucket]
        padded = {"frames": T, "reference_frames": R}
        channels = dataset.latent_channels
        arrays = {
            member.entry: self._empty(
                self._memory, rows, padded[member.length], member.width or channels
            )
            for member in members.ARRAYS
        }
        arrays_rows = zip(*(array.numpy() for array in arrays.values()))
        features_rows: Sequence[np.ndarray | None] = [None] * rows
        if features_of is not None:
            features = self._empty(self._features_memory, rows, L, features_of.width)
            # As integers of the same width: numpy has no bfloat16.
            bits = torch.int16 if features.dtype.itemsize == 2 else torch.int32
            features_rows = list(features.view(bits).numpy())
        text_ids = np.full((rows, L), tokenizer.pad_id, np.int64)
        text_bytes = np.zeros((rows, T), np.uint8) if self.text_bytes else [None] * rows
        global_rows = np.arange(first, first + rows, dtype=np.int64)
        drop = tokenizer.dropped(self.order.seed, batch.number, global_rows)
        crops = self.order.crops(batch)[first : first + rows].tolist()
        words: list[list[int]] = [[]] * rows
        pieces: list[Piece] = []
        if (references := self.row_loader.references) is not None:
            words = self.order.reference_words(batch, WORDS)[first : first + rows].tolist()
            for sample, row_words in zip(samples.tolist(), words):
                pieces += references.draw(row_words, sample, R)
        into_rows = map(
            Row,
            arrays_rows,
            text_ids,
            features_rows,
            drop.tolist(),
            crops,
            words,
            text_bytes,
        )
        lengths, used = self._load(batch, first, samples.tolist(), pieces, into_rows)
        frames, speaker_frames, tokens, n_bytes = lengths.T.copy()

        # numpy for what is small: torch would start a thread pool in each loader thread.
        valid = np.arange(T) < frames[:, None]
        text_mask = np.arange(L) < tokens[:, None]
        input_dict = {
            "text_ids": text_ids,
            "text_mask": text_mask,
            "text_positions": tokenizer.text_positions(text_ids, text_mask),
            "speaker_mask": np.arange(R) < speaker_frames[:, None],
            "frames": frames,
            "global_batch": np.array(batch.number, np.int64),
            "row": global_rows,
            "global_batch_size": np.array(len(batch.samples), np.int64),
        }
        input_dict = {name: self._tensor(array) for name, array in input_dict.items()}
        input_dict |= arrays
        input_dict |= {
            "sample_id": [dataset.sample_id(sample) for sample in used],
            "replaced": sum(map(int.__ne__, used, samples.tolist())),
        }
        if features_of is not None:
            input_dict["text_features"] = features
        if self.text_bytes:
            input_dict["text_bytes"] = self._tensor(np.asarray(text_bytes))
            input_dict["aligns"] = self._tensor(n_bytes >= 0)
            input_dict["ctc_lengths"] = list(
                zip(frames.tolist(), n_bytes.clip(0).tolist(), strict=True)
            )
        labels = self._tensor(np.where(valid, np.int64(0), np.int64(IGNORE_INDEX)))
        return input_dict, labels

    def _load(
        self,
        batch: GlobalBatch,
        first: int,
        samples: list[int],
        pieces: Sequence[Piece],
        into_rows: Iterable[Row],
    ) -> tuple[np.ndarray, list[int]]:
        """Fill rows of the global batch from `first` on with samples and with pieces of references.

        Returns:
            (B, 4) int64, a row's being what `RowLoader.load` returns for it, and the samples taken.
        """
        lengths, used = [], []
        fetched = self.row_loader.fetch(samples, pieces)
        for row, (sample, into) in enumerate(zip(samples, into_rows)):
            self.check_open()
            try:
                lengths.append(self.row_loader.load(sample, fetched, into))
            except CorruptSampleError as error:
                sample, row_lengths = self._replace(batch, first + row, sample, error, into)
                lengths.append(row_lengths)
            used.append(sample)
        self.row_loader.corrupt_samples.reads += len(samples)
        return np.array(lengths, np.int64), used

    def _replace(
        self, batch: GlobalBatch, row: int, sample: int, error: CorruptSampleError, into: Row
    ) -> tuple[int, tuple[int, int, int, int]]:
        """Fill `row` of the global batch with the replacement of a corrupt sample.

        Returns:
            The sample that was taken, and what `RowLoader.load` returns for it.
        """
        corrupt_samples = self.row_loader.corrupt_samples
        for attempt in range(_MAX_REPLACEMENTS):
            if corrupt_samples.on_error == "raise":
                raise error
            corrupt_samples.count(self.row_loader.dataset, sample, error)
            sample = self.order.replacement(batch, row, attempt)
            try:
                return sample, self.row_loader.load(sample, self.row_loader.fetch([sample]), into)
            except CorruptSampleError as next_error:
                error = next_error
        raise InputError(
            f"{_MAX_REPLACEMENTS} samples in a row are corrupt in the bucket of "
            f"{self.policy.edges[batch.bucket]} frames; restore the shards"
        )

    def _empty(self, memory: BufferPool, *shape: int) -> torch.Tensor:
        if self.pin_memory:  # torch reuses page-locked memory itself
            return torch.empty(shape, dtype=memory.dtype, pin_memory=True)
        return memory.tensor(*shape)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.pin_memory else tensor
