"""Collates samples of a global batch to a micro-batch: padded rows, or whole samples one behind the other."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatch, GlobalBatchSampler
from torchtitan.models.dit_tts.data.buffer_pool import BufferPool
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy, reference_limits
from torchtitan.models.dit_tts.data.references import (
    WORDS,
    DrawnReferences,
    FixedReferences,
    Piece,
    shortened,
)
from torchtitan.models.dit_tts.data.row_loader import Row, RowLoader
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.counter_rng import stream_keys, uniform

Batch = tuple[dict[str, Any], torch.Tensor]
"""(input_dict, labels) of `Collator`"""
_VERBATIM_STREAM = 400  # of the random numbers, apart from those of noise, times and dropout
# A bucket in which so many samples in a row are corrupt ends the run.
_MAX_REPLACEMENTS = 100


class Collator:
    """Makes the micro-batches `(input_dict, labels)`.

    `input_dict`, for B rows of a bucket of shape (T, L, R), holds the arrays of `members.ARRAYS`,
    float32, and the rest:

    ================  ==================  =====================================================
    latents           (B, T, C) float32   zero at padding; cropped to T
    frames            (B,) int64          valid ones of them
    text_ids          (B, L) int64        `tokenizer.pad_id` at padding
    text_tokens       (B,) int64          valid ones of them
    text_positions    (B, L) float32      `Tokenizer.text_positions`, -1 at padding
    text_features     (B, L, h)           with `features`: in their dtype, zero at padding and
                                          at conditioning tokens
    speaker           (B, R, C) float32   reference latents, R of them from a drawn start if there are
                                          more, zero at padding
    speaker_frames    (B,) int64          valid ones of them
    sample_id         list of B str       `shard:key`
    global_batch      () int64            number of the global batch, from 0
    row               (B,) int64          row in the global batch
    global_batch_size () int64            G, samples of the global batch
    replaced          int                 corrupt samples that another one replaces
    ================  ==================  =====================================================

    `labels` (B, T) int64 is 0 at valid frames and IGNORE_INDEX at padding.

    Args:
        shapes: (T, L, R) of each bucket.
        max_rows: of a micro-batch of each bucket.
        order: of the global batches, which replaces corrupt samples and crops long references at random.
            None, for a fixed set: a corrupt sample is an error, and the first frames are taken.
        references: draws references, at random or fixed ones; None: those that are stored.
        pin_memory: page-locked tensors, for asynchronous copies to a GPU.
        verbatim_fraction: of draws that take a sample's verbatim text; of no use without an order.
    """

    def __init__(
        self,
        row_loader: RowLoader,
        shapes: Sequence[tuple[int, int, int]],
        max_rows: Sequence[int],
        order: GlobalBatchSampler | None = None,
        references: DrawnReferences | FixedReferences | None = None,
        pin_memory: bool = False,
        verbatim_fraction: float = 0.0,
    ):
        self.row_loader = row_loader
        self.shapes = shapes
        self.order = order
        self.references = references
        self.pin_memory = pin_memory
        self.verbatim_fraction = verbatim_fraction
        self._closed = False
        channels, features = row_loader.dataset.latent_channels, row_loader.features
        max_frames = max(size * max(T, R) for size, (T, _, R) in zip(max_rows, shapes))
        widest = max(member.width or channels for member in members.ARRAYS)
        self._memory = BufferPool(max_frames * widest)
        if features is not None:
            max_tokens = max(size * L for size, (_, L, _) in zip(max_rows, shapes))
            self._features_memory = BufferPool(max_tokens * features.width, features.torch_dtype)

    def close(self) -> None:
        """Stops worker threads at their next row; they raise RuntimeError."""
        self._closed = True

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the loader was closed")

    def collate(self, batch: GlobalBatch, first: int, rows: int) -> Batch:
        """So many rows of a global batch, from row `first` on. Thread-safe."""
        dataset, tokenizer = self.row_loader.dataset, self.row_loader.tokenizer
        samples = batch.samples[first : first + rows].tolist()
        T, L, R = self.shapes[batch.bucket]
        arrays, features, bits = self._buffers(rows, T, L, R)
        text_ids = np.full((rows, L), tokenizer.pad_id, np.int64)
        positions = np.empty((rows, L), np.float32)
        global_rows = np.arange(first, first + rows, dtype=np.int64)
        seed, crops = 0, [0] * rows
        if self.order is not None:
            seed, crops = self.order.seed, self.order.crops(batch)[first : first + rows].tolist()
        references = self._references(batch, slice(first, first + rows), [R] * rows)
        into_rows = map(
            Row,
            zip(*(array.numpy() for array in arrays.values())),
            text_ids,
            positions,
            [None] * rows if bits is None else bits,
            tokenizer.dropped(seed, batch.number, global_rows).tolist(),
            crops,
            map(references, range(rows), samples),
            self._verbatim(batch, global_rows),
        )
        lengths, used = self._load(batch, first, samples, list(into_rows), references)
        columns = np.stack([*lengths.T, global_rows])
        valid = np.arange(T) < columns[0, :, None]
        labels = np.where(valid, np.int64(0), np.int64(IGNORE_INDEX))
        inputs, loss_labels = self._finish(
            batch, columns, text_ids, positions, labels, arrays, features
        )
        names = [dataset.sample_id(sample) for sample in used]
        replaced = sum(map(int.__ne__, used, samples))
        return inputs | {"sample_id": names, "replaced": replaced}, loss_labels

    def _buffers(
        self, rows: int, frames: int, tokens: int, references: int
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, np.ndarray | None]:
        """Uninitialised: the arrays of `members.ARRAYS`; the text features, if any, and their bits."""
        channels, features_of = self.row_loader.dataset.latent_channels, self.row_loader.features
        padded = {"frames": frames, "reference_frames": references}
        arrays = {
            member.entry: self._empty(
                self._memory, rows, padded[member.length], member.width or channels
            )
            for member in members.ARRAYS
        }
        if features_of is None:
            return arrays, None, None
        features = self._empty(self._features_memory, rows, tokens, features_of.width)
        # As integers of the same width: numpy has no bfloat16.
        bits = torch.int16 if features.dtype.itemsize == 2 else torch.int32
        return arrays, features, features.view(bits).numpy()

    def _finish(
        self,
        batch: GlobalBatch,
        columns: np.ndarray,
        text_ids: np.ndarray,
        text_positions: np.ndarray,
        labels: np.ndarray,
        arrays: dict[str, torch.Tensor],
        features: torch.Tensor | None,
    ) -> Batch:
        """The batch without names and count of samples. columns: (4, samples), of each what `RowLoader.load`
        returns for it, and its row."""
        frames, speaker_frames, tokens, row = np.ascontiguousarray(columns)
        # numpy for small arrays: torch would start a thread pool in each loader thread.
        small = {
            "frames": frames,
            "text_ids": text_ids,
            "text_tokens": tokens,
            "text_positions": text_positions,
            "speaker_frames": speaker_frames,
            "global_batch": np.array(batch.number, np.int64),
            "row": row,
            "global_batch_size": np.array(len(batch.samples), np.int64),
        }
        inputs: dict[str, Any] = {name: self._tensor(array) for name, array in small.items()}
        inputs |= arrays
        if features is not None:
            inputs["text_features"] = features
        return inputs, self._tensor(labels)

    def _verbatim(self, batch: GlobalBatch, rows: np.ndarray) -> list[bool]:
        """Whether each of these rows of a global batch takes the verbatim text: a pure function of its position."""
        if self.order is None or not self.verbatim_fraction:
            return [False] * len(rows)
        position = torch.tensor(batch.number), torch.from_numpy(rows)
        drawn = uniform(stream_keys(self.order.seed, *position, _VERBATIM_STREAM))
        return (drawn < self.verbatim_fraction).tolist()

    def _references(
        self, batch: GlobalBatch, inside: slice, limits: list[int]
    ) -> Callable[[int, int], list[Piece]]:
        """A function of (index `inside` the batch, sample there) to the pieces of its drawn reference."""
        drawn = self.references
        if isinstance(drawn, FixedReferences):
            return lambda index, sample: drawn.pieces(sample, limits[index])
        if drawn is None or self.order is None:
            return lambda index, sample: []
        words = self.order.reference_words(batch, WORDS)[inside].tolist()
        return lambda index, sample: drawn.draw(words[index], sample, limits[index])

    def _load(
        self,
        batch: GlobalBatch,
        first: int,
        samples: list[int],
        into_rows: list[Row],
        references: Callable[[int, int], list[Piece]],
    ) -> tuple[np.ndarray, list[int]]:
        """Fill rows of the global batch from `first` on with samples, or with the replacements of
        corrupt ones. Returns (B, 3) int64, a row's being what `RowLoader.load` returns for it, and
        the samples taken.
        """
        lengths, used = [], []
        fetched = self.row_loader.fetch(
            samples, [piece for into in into_rows for piece in into.reference]
        )
        for row, (sample, into) in enumerate(zip(samples, into_rows, strict=True)):
            self.check_open()
            replacements = self._replacements(batch, first + row)
            row_fetched = fetched
            while True:
                try:
                    lengths.append(self.row_loader.load(sample, row_fetched, into))
                    break
                except CorruptSampleError as error:
                    self.row_loader.corrupt_samples.skip(self.row_loader.dataset, sample, error)
                sample = next(replacements)
                into = into._replace(reference=references(row, sample))
                row_fetched = self.row_loader.fetch([sample])
            used.append(sample)
        self.row_loader.corrupt_samples.reads += len(samples)
        return np.array(lengths, np.int64), used

    def _replacements(self, batch: GlobalBatch, row: int) -> Iterator[int]:
        """Samples for a row of the global batch, each in case that the one before is corrupt, too."""
        assert self.order is not None
        for attempt in range(_MAX_REPLACEMENTS):
            yield self.order.replacement(batch, row, attempt)
        raise InputError(
            f"{_MAX_REPLACEMENTS} samples in a row are corrupt in the bucket of "
            f"{self.shapes[batch.bucket][0]} frames; restore the shards"
        )

    def _empty(self, memory: BufferPool, *shape: int) -> torch.Tensor:
        if self.pin_memory:  # torch reuses page-locked memory itself
            return torch.empty(shape, dtype=memory.dtype, pin_memory=True)
        return memory.tensor(*shape)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.pin_memory else tensor


class PackedCollator(Collator):
    """Makes one row of B rows of shape (N, L, P), with places for S = B * max_samples samples.

    `input_dict` has the entries of `Collator`, of which differ

    ================  ==========================  ================================================
    latents           (1, B*N, C) float32
    text_ids          (1, B*L) int64              and text_positions, text_features
    speaker           (1, B*P, C) float32         each reference zero up to whole patches
    frames            (S,) int64                  and text_tokens, speaker_frames, row; 0 behind
                                                  the last sample
    global_batch_size () int64                    samples, in which `row` counts
    replaced          int                         corrupt samples, which are left out
    longest           tuple of 3 int              frames, tokens and reference frames that a
                                                  sample can have
    ================  ==========================  ================================================
    """

    def __init__(self, policy: PackedPolicy, data: Data, *of_collator: Any):
        super().__init__(*of_collator)
        self.policy = policy
        self.data = data

    def collate(self, batch: GlobalBatch, first: int, rows: int) -> Batch:
        loader, order, longest = self.row_loader, self.order, self.policy.longest
        dataset, tokenizer = loader.dataset, loader.tokenizer
        assert order is not None and batch.starts is not None
        N, L, P = (rows * size for size in self.shapes[0])
        starts = batch.starts[first : first + rows + 1]
        inside = slice(starts[0], starts[-1])
        samples, numbers = batch.samples[inside], np.arange(starts[0], starts[-1])
        sizes = np.minimum(dataset.frames[samples], longest[0]).tolist()
        text_sizes = [0] * len(samples)
        if loader.features is not None:
            text_sizes = (loader.features.tokens[samples] + tokenizer.n_conditions).tolist()
        pieces, reference_sizes = self._rows_references(batch, starts, sizes)
        arrays, features, bits = self._buffers(1, N, L, P)
        ids = np.full((len(samples), longest[1]), tokenizer.pad_id, np.int64)
        places = np.empty((len(samples), longest[1]), np.float32)
        drop = tokenizer.dropped(order.seed, batch.number, numbers).tolist()
        crops = order.crops(batch)[inside].tolist()
        verbatim = self._verbatim(batch, numbers)
        fetched = loader.fetch(samples.tolist(), list(chain(*pieces)))
        # What a corrupt sample has written, the next one overwrites.
        lengths, kept, end = [], [], np.zeros(3, int)
        for index, sample in enumerate(samples.tolist()):
            self.check_open()
            size = sizes[index], text_sizes[index], reference_sizes[index]
            frames, tokens, reference = map(slice, end, end + size)
            into = Row(
                [
                    arrays[each.entry][0, frames if each.length == "frames" else reference].numpy()
                    for each in members.ARRAYS
                ],
                ids[index],
                places[index],
                None if bits is None else bits[0, tokens],
                drop[index],
                crops[index],
                pieces[index],
                verbatim[index],
            )
            try:
                lengths.append(loader.load(sample, fetched, into))
            except CorruptSampleError as error:
                loader.corrupt_samples.skip(dataset, sample, error)
                continue
            kept.append(index)
            # A stored reference in place of a corrupt drawn one may be shorter.
            patches = -(-lengths[-1][1] // self.data.speaker_patch_size)
            end += size[0], lengths[-1][2], patches * self.data.speaker_patch_size
        loader.corrupt_samples.reads += len(samples)
        for member in members.ARRAYS:
            arrays[member.entry][0, end[0 if member.length == "frames" else 2] :] = 0
        if features is not None:
            features[0, end[1] :] = 0

        columns = np.zeros((4, rows * self.policy.max_samples), np.int64)
        columns[:3, : len(kept)] = np.reshape(lengths, (-1, 3)).T
        columns[3, : len(kept)] = numbers[kept]
        mask = np.arange(longest[1]) < columns[2, : len(kept), None]
        text_ids = np.full((1, L), tokenizer.pad_id, np.int64)
        text_ids[0, : end[1]] = ids[kept][mask]
        positions = np.full((1, L), -1, np.float32)
        positions[0, : end[1]] = places[kept][mask]
        labels = np.full((1, N), IGNORE_INDEX, np.int64)
        labels[0, : end[0]] = 0
        inputs, loss_labels = self._finish(
            batch, columns, text_ids, positions, labels, arrays, features
        )
        names = [dataset.sample_id(sample) for sample in samples[kept].tolist()]
        counts = {"sample_id": names, "replaced": len(samples) - len(kept), "longest": longest}
        return inputs | counts, loss_labels

    def _rows_references(
        self, batch: GlobalBatch, starts: np.ndarray, frames: list[int]
    ) -> tuple[list[list[Piece]], list[int]]:
        """The pieces of each sample's drawn reference, none for the stored one, and the frames that it may
        take, in whole patches. Where drawn ones are longer than their row, its longest are cut to one length."""
        patch, inside = self.data.speaker_patch_size, slice(starts[0], starts[-1])
        samples, limits = batch.samples[inside], reference_limits(self.data, np.array(frames))
        draw = self._references(batch, inside, limits.tolist())
        pieces = list(map(draw, range(len(samples)), samples.tolist()))
        total = np.array([sum(piece.frames for piece in each) for each in pieces], int)
        stored = np.minimum(self.row_loader.dataset.reference_frames[samples], limits)
        wanted = np.where(total > 0, total, stored)
        patches = -(-wanted // patch)
        for begin, end in pairwise(starts - starts[0]):
            most = patches[begin:end].max(initial=0)
            while patches[begin:end].clip(max=most).sum() * patch > self.shapes[0][2]:
                most -= 1
            patches[begin:end] = patches[begin:end].clip(max=most)
        sizes = (patches * patch).tolist()
        return list(map(shortened, pieces, sizes)), sizes
