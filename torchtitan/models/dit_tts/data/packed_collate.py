"""Collates rows of packed samples: whole samples one behind the other, padding behind the last one only."""

from itertools import chain, pairwise

import numpy as np

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatch, GlobalBatchSampler
from torchtitan.models.dit_tts.data.collate import Batch, Collator
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy, reference_limits
from torchtitan.models.dit_tts.data.references import WORDS, DrawnReferences, Piece, shortened
from torchtitan.models.dit_tts.data.row_loader import Row, RowLoader


class PackedCollator(Collator):
    """Makes one row of B rows of shape (N, L, P), with places for S = B * max_samples samples.

    `input_dict` has the entries of `Collator`, of which differ

    ================  ==========================  ================================================
    latents           (1, B*N, C) float32         and text_bytes, a sample's at its first frame
    text_ids          (1, B*L) int64              and text_positions, text_features
    speaker           (1, B*P, C) float32         each reference zero up to whole patches
    frames            (S,) int64                  and text_tokens, speaker_frames, aligns, row; 0
                                                  behind the last sample
    global_batch_size () int64                    samples, in which `row` counts
    replaced          int                         corrupt samples, which are left out
    longest           tuple of 3 int              frames, tokens and reference frames that a
                                                  sample can have
    ================  ==========================  ================================================
    """

    def __init__(
        self,
        row_loader: RowLoader,
        policy: PackedPolicy,
        max_rows: int,
        order: GlobalBatchSampler,
        data: Data,
        references: DrawnReferences | None = None,
        text_bytes: bool = False,
        pin_memory: bool = False,
    ):
        super().__init__(
            row_loader, policy.shapes, [max_rows], order, references, text_bytes, pin_memory
        )
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
        pieces, reference_sizes = self._rows_references(batch, starts, sizes)
        arrays, features, bits = self._buffers(1, N, L, P)
        ids = np.full((len(samples), longest[1]), tokenizer.pad_id, np.int64)
        text_bytes = np.zeros((1, N), np.uint8) if self.text_bytes else None
        drop = tokenizer.dropped(order.seed, batch.number, numbers).tolist()
        crops = order.crops(batch)[inside].tolist()
        fetched = loader.fetch(samples.tolist(), list(chain(*pieces)))
        # What a corrupt sample has written, the next one overwrites.
        lengths, kept, end = [], [], np.zeros(3, int)
        for index, sample in enumerate(samples.tolist()):
            self.check_open()
            size = sizes[index], 0, reference_sizes[index]
            if loader.features is not None:
                size = (
                    size[0],
                    int(loader.features.tokens[sample]) + tokenizer.n_conditions,
                    size[2],
                )
            frames, tokens, reference = map(slice, end, end + size)
            into = Row(
                [
                    arrays[each.entry][0, frames if each.length == "frames" else reference].numpy()
                    for each in members.ARRAYS
                ],
                ids[index],
                None if bits is None else bits[0, tokens],
                drop[index],
                crops[index],
                pieces[index],
                None if text_bytes is None else text_bytes[0, frames],
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

        columns = np.zeros((5, rows * self.policy.max_samples), np.int64)
        columns[3] = -1
        columns[:4, : len(kept)] = np.reshape(lengths, (-1, 4)).T
        columns[4, : len(kept)] = numbers[kept]
        mask = np.arange(longest[1]) < columns[2, : len(kept), None]
        text_ids = np.full((1, L), tokenizer.pad_id, np.int64)
        text_ids[0, : end[1]] = ids[kept][mask]
        positions = np.full((1, L), -1, np.float32)
        positions[0, : end[1]] = tokenizer.text_positions(ids[kept], mask)[mask]
        labels = np.full((1, N), IGNORE_INDEX, np.int64)
        labels[0, : end[0]] = 0
        inputs, loss_labels = self._finish(
            batch, columns, text_ids, positions, text_bytes, labels, arrays, features
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
        samples, drawn = batch.samples[inside], self.references
        limits = reference_limits(self.data, np.array(frames))
        wanted = np.minimum(self.row_loader.dataset.reference_frames[samples], limits)
        pieces: list[list[Piece]] = [[] for _ in samples]
        if drawn is not None and self.order is not None:
            words = self.order.reference_words(batch, WORDS)[inside].tolist()
            pieces = list(map(drawn.draw, words, samples.tolist(), limits.tolist()))
            total = np.array([sum(piece.frames for piece in each) for each in pieces])
            wanted = np.where(total > 0, total, wanted)
        patches = -(-wanted // patch)
        for begin, end in pairwise(starts - starts[0]):
            most = patches[begin:end].max(initial=0)
            while patches[begin:end].clip(max=most).sum() * patch > self.shapes[0][2]:
                most -= 1
            patches[begin:end] = patches[begin:end].clip(max=most)
        sizes = (patches * patch).tolist()
        return list(map(shortened, pieces, sizes)), sizes
