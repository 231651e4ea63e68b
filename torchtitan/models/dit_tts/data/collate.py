"""Collates samples of a global batch to a micro-batch: padded rows, or whole samples one behind the other."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatch, GlobalBatchSampler
from torchtitan.models.dit_tts.data.buckets import ALIGNMENT, round_up
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Fetched
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy, reference_limits
from torchtitan.models.dit_tts.data.references import (
    WORDS,
    DrawnReferences,
    FixedReferences,
    Piece,
    shortened,
)
from torchtitan.models.dit_tts.data.row_loader import Loaded, Row, RowLoader, Target
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
    latents           (B, T, C) float32   zero at padding
    frames            (B,) int64          valid ones of them
    text_ids          (B, L) int64        `tokenizer.pad_id` at padding
    text_tokens       (B,) int64          valid ones of them
    text_positions    (B, L) float32      `Tokenizer.text_positions`, -1 at padding
    speaker           (B, R, C) float32   reference latents, R of them from a drawn start if there are
                                          more, zero at padding
    speaker_frames    (B,) int64          valid ones of them
    caption_ids       (B, C) int64        with `caption_tokens` C > 0 only, zero at padding
    caption_tokens    (B,) int64          valid ones of them
    sample_id         list of B str       `shard:key`
    global_batch      () int64            number of the global batch, from 0
    row               (B,) int64          row in the global batch
    global_batch_size () int64            G, samples of the global batch
    replaced          int                 corrupt samples that another sample replaces
    ================  ==================  =====================================================

    `labels` (B, T) int64 is 0 at valid frames and IGNORE_INDEX at padding.

    Args:
        shapes: (T, L, R) of each bucket.
        order: of the global batches, which replaces corrupt samples and crops long references at random.
            None, for a fixed set: a corrupt sample is an error, and the first frames are taken.
        references: draws references, at random or fixed ones; None: those that are stored.
        pin_memory: page-locked tensors, for asynchronous copies to a GPU.
        verbatim_fraction: of draws that take a sample's verbatim text; of no use without an order.
        caption_tokens: C, places for a caption.
    """

    def __init__(
        self,
        row_loader: RowLoader,
        shapes: Sequence[tuple[int, int, int]],
        order: GlobalBatchSampler | None = None,
        references: DrawnReferences | FixedReferences | None = None,
        pin_memory: bool = False,
        verbatim_fraction: float = 0.0,
        caption_tokens: int = 0,
    ):
        self.row_loader = row_loader
        self.shapes = shapes
        self.order = order
        self.references = references
        self.pin_memory = pin_memory
        self.verbatim_fraction = verbatim_fraction
        self.caption_tokens = caption_tokens
        self._closed = False

    def close(self) -> None:
        """Stops worker threads at their next row; they raise RuntimeError."""
        self._closed = True

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the loader was closed")

    def collate(self, batch: GlobalBatch, first: int, rows: int) -> Batch:
        """Collate `rows` rows of a global batch, from row `first` on. Thread-safe."""
        T, L, R = self.shapes[batch.bucket]
        planned = self._rows(batch, slice(first, first + rows), [R] * rows)
        arrays = self._arrays(rows, T, R)
        text_ids = np.full((rows, L), self.row_loader.tokenizer.pad_id, np.int64)
        positions = np.empty((rows, L), np.float32)
        captions = np.zeros((rows, self.caption_tokens), np.int64)
        parts = zip(*(array.numpy() for array in arrays.values()))
        fetched = self.row_loader.fetch(planned)
        loaded = [
            self._load(batch, row, fetched, into)
            for row, into in zip(
                planned, map(Target, parts, text_ids, positions, captions), strict=True
            )
        ]
        self.row_loader.corrupt_samples.reads += rows
        frames = np.array([each.frames for each in loaded])
        labels = np.where(np.arange(T) < frames[:, None], np.int64(0), np.int64(IGNORE_INDEX))
        inputs = self._inputs(batch, loaded, text_ids, positions, captions) | arrays
        replaced = sum(row.sample != each.row.sample for row, each in zip(planned, loaded))
        return inputs | {"replaced": replaced}, self._tensor(labels)

    def _rows(self, batch: GlobalBatch, inside: slice, limits: Sequence[int]) -> list[Row]:
        """The rows of the samples `inside` a batch. `limits`: maximum frames of each one's reference."""
        samples, numbers = batch.samples[inside].tolist(), np.arange(inside.start, inside.stop)
        count = len(samples)
        seed, crops, words, verbatim = 0, [0] * count, [None] * count, [False] * count
        if self.order is not None:
            seed, crops = self.order.seed, self.order.crops(batch)[inside].tolist()
            if isinstance(self.references, DrawnReferences):
                words = self.order.reference_words(batch, WORDS)[inside].tolist()
            if self.verbatim_fraction:
                position = torch.tensor(batch.number), torch.from_numpy(numbers)
                drawn = uniform(stream_keys(seed, *position, _VERBATIM_STREAM))
                verbatim = (drawn < self.verbatim_fraction).tolist()
        drop = self.row_loader.tokenizer.dropped(seed, batch.number, numbers).tolist()
        given = zip(numbers.tolist(), samples, drop, crops, verbatim, words, limits, strict=True)
        return [self._with_reference(Row(*each)) for each in given]

    def _with_reference(self, row: Row) -> Row:
        """The row with the drawn reference of its sample, if there is one."""
        drawn, pieces = self.references, list[Piece]()
        if isinstance(drawn, FixedReferences):
            pieces = drawn.pieces(row.sample, row.max_reference)
        elif drawn is not None and row.words is not None:
            pieces = drawn.draw(row.words, row.sample, row.max_reference)
        return row._replace(reference=pieces)

    def _load(self, batch: GlobalBatch, row: Row, fetched: Fetched, into: Target) -> Loaded:
        """Write a row; while its sample is corrupt, another sample takes its place."""
        for attempt in range(1 + _MAX_REPLACEMENTS):
            self.check_open()
            try:
                return self.row_loader.load(row, fetched, into)
            except CorruptSampleError as error:
                self.row_loader.corrupt_samples.skip(self.row_loader.dataset, row.sample, error)
            assert self.order is not None  # without an order a corrupt sample is an error
            sample = self.order.replacement(batch, row.number, attempt)
            row = self._with_reference(row._replace(sample=sample))
            fetched = self.row_loader.fetch([row])
        raise InputError(
            f"{_MAX_REPLACEMENTS} samples in a row are corrupt in the bucket of "
            f"{self.shapes[batch.bucket][0]} frames; restore the shards"
        )

    def _arrays(self, rows: int, frames: int, reference_frames: int) -> dict[str, torch.Tensor]:
        """The arrays of `members.ARRAYS` by their entries, uninitialised."""
        padded = {"frames": frames, "reference_frames": reference_frames}
        channels = self.row_loader.dataset.latent_channels
        shapes = {
            member.entry: (rows, padded[member.length], member.width or channels)
            for member in members.ARRAYS
        }
        pinned = self.pin_memory
        return {name: torch.empty(shape, pin_memory=pinned) for name, shape in shapes.items()}

    def _inputs(
        self,
        batch: GlobalBatch,
        loaded: Sequence[Loaded],
        text_ids: np.ndarray,
        text_positions: np.ndarray,
        captions: np.ndarray,
    ) -> dict[str, Any]:
        """All entries but the arrays and `replaced`, zero where there are fewer samples than `captions` has rows."""
        columns = np.zeros((5, len(captions)), np.int64)
        for place, (row, *lengths) in enumerate(loaded):
            columns[:, place] = row.number, *lengths
        # numpy for small arrays: torch would start a thread pool in each loader thread.
        names = "row", "frames", "speaker_frames", "text_tokens", "caption_tokens"
        small = dict(zip(names if self.caption_tokens else names[:4], columns))
        if self.caption_tokens:
            small["caption_ids"] = captions
        small |= {
            "text_ids": text_ids,
            "text_positions": text_positions,
            "global_batch": np.array(batch.number, np.int64),
            "global_batch_size": np.array(len(batch.samples), np.int64),
        }
        inputs: dict[str, Any] = {name: self._tensor(array) for name, array in small.items()}
        sample_id = self.row_loader.dataset.sample_id
        return inputs | {"sample_id": [sample_id(each.row.sample) for each in loaded]}

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.pin_memory else tensor


class PackedCollator(Collator):
    """Makes one row of B rows of shape (N, L, P), with places for S = B * max_samples samples.

    `input_dict` has the entries of `Collator`, of which differ

    ================  ==========================  ================================================
    latents           (1, B*N, C) float32
    text_ids          (1, B*L) int64              and text_positions
    speaker           (1, B*P, C) float32         each reference zero up to whole patches
    frames            (S,) int64                  and text_tokens, speaker_frames, row, caption_tokens;
                                                  0 behind the last sample
    caption_ids       (S, C) int64
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
        loader, longest = self.row_loader, self.policy.longest
        assert batch.starts is not None
        N, L, P = (rows * size for size in self.shapes[0])
        starts = batch.starts[first : first + rows + 1]
        inside = slice(int(starts[0]), int(starts[-1]))
        frames = loader.dataset.frames[batch.samples[inside]]
        limits = reference_limits(self.data, frames)
        planned = self._fitted(self._rows(batch, inside, limits.tolist()), starts - starts[0])
        arrays = self._arrays(1, N, P)
        text_ids = np.full((1, L), loader.tokenizer.pad_id, np.int64)
        positions = np.full((1, L), -1, np.float32)
        ids, places = np.empty(longest[1], np.int64), np.empty(longest[1], np.float32)
        captions = np.zeros((rows * self.policy.max_samples, self.caption_tokens), np.int64)
        fetched = loader.fetch(planned)
        # What a corrupt sample has written, the next one overwrites.
        loaded: list[Loaded] = []
        used, ends = 0, {"frames": 0, "reference_frames": 0}
        for row, length in zip(planned, frames.tolist(), strict=True):
            self.check_open()
            sizes = {"frames": length, "reference_frames": row.max_reference}
            of_row = [
                arrays[each.entry][0, ends[each.length] : ends[each.length] + sizes[each.length]]
                for each in members.ARRAYS
            ]
            own = [part.numpy() for part in of_row], ids, places, captions[len(loaded)]
            try:
                loaded.append(found := loader.load(row, fetched, Target(*own)))
            except CorruptSampleError as error:
                loader.corrupt_samples.skip(loader.dataset, row.sample, error)
                continue
            text_ids[0, used : used + found.tokens] = ids[: found.tokens]
            positions[0, used : used + found.tokens] = places[: found.tokens]
            used += found.tokens
            ends["frames"] += length
            # A stored reference in place of a corrupt drawn one may be shorter.
            ends["reference_frames"] += round_up(found.speaker_frames, self.data.speaker_patch_size)
        loader.corrupt_samples.reads += len(planned)
        for member in members.ARRAYS:
            arrays[member.entry][0, ends[member.length] :] = 0
        labels = np.full((1, N), IGNORE_INDEX, np.int64)
        labels[0, : ends["frames"]] = 0
        inputs = self._inputs(batch, loaded, text_ids, positions, captions)
        counts = {"replaced": len(planned) - len(loaded), "longest": longest}
        return inputs | arrays | counts, self._tensor(labels)

    def _fitted(self, rows: list[Row], starts: np.ndarray) -> list[Row]:
        """The samples of packed rows, which begin at `starts`, with references in whole patches that fit. Where drawn
        ones are longer than their packed row, its longest are cut to one length."""
        patch, stored = self.data.speaker_patch_size, self.row_loader.dataset.reference_frames
        wanted = [
            sum(piece.frames for piece in row.reference)
            or min(int(stored[row.sample]), row.max_reference)
            for row in rows
        ]
        patches = round_up(np.array(wanted, int), patch) // patch
        for begin, end in pairwise(starts):
            most = patches[begin:end].max(initial=0)
            while patches[begin:end].clip(max=most).sum() * patch > self.shapes[0][2]:
                most -= 1
            patches[begin:end] = patches[begin:end].clip(max=most)
        return [
            row._replace(max_reference=size, reference=shortened(row.reference, size))
            for row, size in zip(rows, (patches * patch).tolist(), strict=True)
        ]


def trim_captions(batch: dict[str, Any]) -> None:
    """`trim_padding` of captions alone."""
    if "caption_ids" in batch:
        longest = max(1, int(batch["caption_tokens"].max()))
        batch["caption_ids"] = batch["caption_ids"][:, : round_up(longest, ALIGNMENT)]


def trim_padding(batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """Cuts off the padding that all rows share, for runs whose shapes need not be static: replaces the tensors of a
    batch by views that end with the longest row's length, rounded up to `ALIGNMENT`. Returns the labels' view."""
    longest = (int(batch[name].max()) for name in ("frames", "text_tokens", "speaker_frames"))
    # At least one position: an empty stream is masked, not missing.
    T, L, R = (round_up(max(1, length), ALIGNMENT) for length in longest)
    padded = {"frames": T, "reference_frames": R}
    ends = {member.entry: padded[member.length] for member in members.ARRAYS}
    for name, end in (ends | {"text_ids": L, "text_positions": L}).items():
        if name in batch:
            batch[name] = batch[name][:, :end]
    trim_captions(batch)
    return labels[:, :T]
