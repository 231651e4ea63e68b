"""The training data loader: padded micro-batches of one rank, and a state of two values.

Why not `StatefulDataLoader`, as upstream: moving a batch out of a worker process costs 5 to 7 times
what loading it in this process does, its state cannot be loaded with another number of workers or
ranks, and `iter()` before `load_state_dict` silently replays from the start. Here threads read the
files straight into the padded batch, and the state is the number of the next global batch together with
what the order of batches depends on.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.batch_ramp import BatchRamp
from torchtitan.models.dit_tts.data.batch_sampler import (
    ORDER_VERSION,
    GlobalBatch,
    GlobalBatchSampler,
)
from torchtitan.models.dit_tts.data.buckets import BatchPolicy
from torchtitan.models.dit_tts.data.buffer_pool import BufferPool
from torchtitan.models.dit_tts.data.corrupt_samples import CorruptSampleCounter
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset, LoadedSample
from torchtitan.models.dit_tts.data.prefetch import ThreadPrefetcher
from torchtitan.models.dit_tts.data.references import WORDS, DrawnReferences, Piece
from torchtitan.models.dit_tts.errors import InputError

MicroBatch = tuple[dict[str, Any], torch.Tensor]

# What each part of the order's fingerprint is set by, for the message of a failed resume.
_SET_BY = {
    "dataset": "the shards of [data] path",
    "seed": "[data] seed",
    "order_version": "the version of this program",
    "bucket_frames": "[data] bucket_frames, num_buckets, max_frames, max_text_tokens, on_too_long or weights",
    "batch_sizes": "[training] global_batch_size or [data] batch_multiple or bucket_batch_sizes",
    "references": "[data] references",
    "reference_frames": "[data] max_speaker_frames or max_reference_ratio",
    "samples": "[data] max_frames, max_text_tokens, on_too_long, weights or balance_by",
    "batch_ramp": "[training] batch_ramp or batch_ramp_steps",
}
# Parts that older checkpoints do not have, and what those were trained with.
_PARTS_ADDED = {"references": "stored", "batch_ramp": []}
_REFERENCE = [member.name for member in members.ARRAYS].index("reference")
# A bucket in which so many samples in a row are corrupt ends the run.
_MAX_REPLACEMENTS = 100


class Tokenizer(Protocol):
    """What the loader asks of a tokenizer, from several threads."""

    pad_id: int
    n_conditions: int
    """conditioning tokens before the text's; asked for with features only"""

    def max_tokens(self, dataset: Dataset, part: tuple[int, int]) -> np.ndarray:
        """(n,) int32: maximum ids of each sample's row; `part` as in `open_dataset`."""
        ...

    def dropped(self, seed: int, global_batch: int, rows: np.ndarray) -> np.ndarray:
        """(B, conditions) bool: the conditioning tokens that these rows of a batch drop."""
        ...

    def encode_into(
        self, row: np.ndarray, text: str, metadata: Mapping[str, Any], drop: Sequence[bool]
    ) -> int:
        """Write the ids to the start of row (L,) int64 and return their number.

        Raises:
            InputError: there are more than L.
        """
        ...

    def places(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """(B, L) float32: where in its speech the middle of each of the ids (B, L) is to be expected, in
        (0, 1); -1 where it is not of the text or mask (B, L) is false."""
        ...


class Features(Protocol):
    """A text encoder's features of every sample's text, stored before the run.

    Attributes:
        width: h, of a token's feature.
        torch_dtype: of the features.
        tokens: (n,) tokens of each sample's text without its conditioning tokens.
        encoder_fingerprint: of the encoder.
    """

    width: int
    torch_dtype: torch.dtype
    tokens: np.ndarray
    encoder_fingerprint: str

    def read(self, sample: int, out: np.ndarray) -> int:
        """Fill the first rows of out (L, h), which gets their bits, and return their number.

        Raises:
            CorruptSampleError: what is stored is not what was written.
            InputError: there are more than L.
        """
        ...


class Row(NamedTuple):
    """What a sample is written to.

    arrays in the order of `members.ARRAYS`, (T or R, width); text_ids (L,), features (L, h) or None,
    which of the conditioning tokens to drop, which part of a stored reference to take, as in `fill`, the
    random words of a drawn one, text_bytes (N,) or None, and a teacher's features (T, K), zero, or None.
    """

    arrays: Sequence[np.ndarray]
    text_ids: np.ndarray
    features: np.ndarray | None
    drop: Sequence[bool]
    crop: int
    words: Sequence[int]
    text_bytes: np.ndarray | None = None
    teacher: np.ndarray | None = None


class Fetched(NamedTuple):
    """Bytes of remote samples, and of the latents alone of others, from `Dataset.fetch_with_latents`."""

    samples: dict[int, bytearray]
    latents: dict[int, bytearray]


class LatentDataLoader(BaseDataLoader):
    """Endless micro-batches `(input_dict, labels)` of one data-parallel rank.

    A global batch of G samples, in row order, is cut into `accumulation_steps * dp_world_size` equal
    contiguous blocks; micro-batch m of rank r is block `m * dp_world_size + r`. Any split of G gives
    the same rows to the same step. During a batch ramp, what a step trains on, a part of a global batch of
    the order, is called global batch here: it has a number, rows and a size of its own.

    `input_dict`, for B rows of a bucket of shape (T, L, R), holds the arrays of `members.ARRAYS`,
    float32, and the rest:

    ================  ==================  =====================================================
    latents           (B, T, C) float32   zero at padding; cropped to T
    text_ids          (B, L) int64        `tokenizer.pad_id` at padding
    text_mask         (B, L) bool         True at valid tokens
    text_places       (B, L) float32      `Tokenizer.places` of the ids
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
    accumulation_steps  int               micro-batches of the global batch
    replaced          int                 corrupt samples that another one replaces
    text_bytes        (B, T) uint8        with `text_bytes`: utf-8 of the texts that can be aligned with
                                          their frames
    aligns            (B,) bool           likewise: which those are
    ctc_lengths       list of B pairs     likewise: valid frames, and bytes (0 of the others)
    teacher_features  (B, T, K)           with `teacher`: in its dtype, zero at padding and in cropped
                                          samples
    ================  ==================  =====================================================

    The global batches whose numbers are in `skipped` are left out.

    `labels` (B, T) int64 is 0 at valid frames and IGNORE_INDEX at padding.

    Args:
        order: made from the batch sizes of `policy` over samples of `dataset`.
        corrupt_samples: what to do about corrupt samples, and their count.
        frames_per_second: of the latents.
        accumulation_steps: micro-batches of a global batch of the order.
        features: of the texts; the first `tokenizer.n_conditions` tokens have none.
        text_bytes: whether batches have the texts' bytes.
        teacher: features of the utterances, frame by frame.
        ramp: the smaller global batches of the start.
        references: draws references; None: those that are stored.
        num_workers: threads that fill batches; 0 fills them in the calling thread.
        prefetch_batches: micro-batches to prefetch.
        pin_memory: page-locked tensors, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: GlobalBatchSampler,
        policy: BatchPolicy,
        tokenizer: Tokenizer,
        corrupt_samples: CorruptSampleCounter,
        *,
        dp_rank: int,
        dp_world_size: int,
        accumulation_steps: int,
        num_workers: int,
        prefetch_batches: int,
        pin_memory: bool,
        frames_per_second: float,
        features: Features | None = None,
        text_bytes: bool = False,
        teacher: Features | None = None,
        ramp: BatchRamp = BatchRamp(),
        references: DrawnReferences | None = None,
    ):
        assert 0 <= dp_rank < dp_world_size and accumulation_steps > 0
        assert order.batch_sizes == policy.batch_sizes
        assert all(size % (dp_world_size * accumulation_steps) == 0 for size in policy.batch_sizes)
        self.dataset = dataset
        self.order = order
        self.policy = policy
        self.tokenizer = tokenizer
        self.corrupt_samples = corrupt_samples
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.accumulation_steps = accumulation_steps
        self.num_workers = num_workers
        self.prefetch_batches = prefetch_batches
        self.pin_memory = pin_memory
        self.frames_per_second = frames_per_second
        self.features = features
        self.text_bytes = text_bytes
        self.teacher = teacher
        self.ramp = ramp
        self.references = references
        # Micro-batches handed out. Prefetched ones do not count: a resume loads them again.
        self.consumed = 0
        self.skipped: set[int] = set()
        blocks = dp_world_size * accumulation_steps
        sizes = [size // blocks for size in policy.batch_sizes]
        max_frames = max(size * max(T, R) for size, (T, _, R) in zip(sizes, policy.shapes))
        widest = max(member.width or dataset.latent_channels for member in members.ARRAYS)
        self._memory = BufferPool(max_frames * widest)
        if features is not None:
            max_tokens = max(size * L for size, (_, L, _) in zip(sizes, policy.shapes))
            self._features_memory = BufferPool(max_tokens * features.width, features.torch_dtype)
        self._recent: OrderedDict[int, GlobalBatch] = OrderedDict()
        self._closed = False
        self._order_lock = threading.Lock()
        self._order_parts = {
            "order_version": ORDER_VERSION,
            "dataset": dataset.fingerprint,
            "seed": order.seed,
            "bucket_frames": list(policy.edges),
            "batch_sizes": list(policy.batch_sizes),
            "references": "stored" if references is None else "drawn",
            "reference_frames": [R for _, _, R in policy.shapes],
            "samples": order.samples_fingerprint(),
            "batch_ramp": [*ramp.divisors, ramp.steps] if ramp.divisors else [],
        }

    def __iter__(self) -> Iterator[MicroBatch]:
        """Continues at the loader's position at each `next`, also after a later `load_state_dict`."""
        batches = ThreadPrefetcher(self.micro_batch, self.num_workers, self.prefetch_batches)
        while True:
            # Read each time: a state may have been loaded, another iterator taken batches.
            position = self.consumed = self._after_skipped(self.consumed)
            batch = batches.take(position)
            self.consumed = position + 1
            yield batch
            del batch  # its memory is for the one that is loaded next

    @property
    def global_batch(self) -> int:
        """Number of the next micro-batch's global batch."""
        return self.ramp.of_micro_batch(self.consumed, self.accumulation_steps)[0]

    def go_to(self, number: int) -> None:
        """The next micro-batch is the first of this global batch."""
        self.consumed = self.ramp.first_micro_batch(number, self.accumulation_steps)

    def micro_batches(self, number: int) -> Iterator[MicroBatch]:
        """Those of this rank in a global batch."""
        first = self.ramp.first_micro_batch(number, self.accumulation_steps)
        for step in range(self.ramp.accumulation(number, self.accumulation_steps)):
            yield self.micro_batch(first + step)

    def close(self) -> None:
        """Stop prefetching, so that the process can end at once."""
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank. Between two micro-batches of one step it points before that step."""
        return {
            "global_batch": self.global_batch,
            "skipped": json.dumps(sorted(self.skipped)),
            "order_fingerprint": json.dumps(self._order_parts, sort_keys=True),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved position; ranks, accumulation, workers and prefetch may all have changed.

        Raises:
            InputError: the order of the batches is no longer the one of the checkpoint.
        """
        if not state_dict:
            return
        saved = _PARTS_ADDED | json.loads(state_dict["order_fingerprint"])
        differing = [name for name, value in self._order_parts.items() if saved.get(name) != value]
        if differing:
            # The first is the cause: other shards or buckets change all that follows.
            name = differing[0]
            raise InputError(
                f"the checkpoint was trained on another order of the data: its {name} is "
                f"{saved.get(name)} and this run's {self._order_parts[name]}; restore "
                f"{_SET_BY[name]}, or start the data from its beginning with "
                '[checkpoint] exclude_from_loading = ["dataloader"]'
            )
        self.go_to(int(state_dict["global_batch"]))
        self.skipped = set(json.loads(state_dict["skipped"]))

    def _after_skipped(self, position: int) -> int:
        """The first micro-batch from `position` on whose global batch is not skipped."""
        number, step = self.ramp.of_micro_batch(position, self.accumulation_steps)
        if step or number not in self.skipped:
            return position
        while number in self.skipped:
            number += 1
        return self.ramp.first_micro_batch(number, self.accumulation_steps)

    def micro_batch(self, position: int) -> MicroBatch:
        """Micro-batch `position` of this rank, counted from the start of training. Thread-safe."""
        if self._closed:
            raise RuntimeError("the loader was closed")
        number, step = self.ramp.of_micro_batch(position, self.accumulation_steps)
        accumulation_steps = self.ramp.accumulation(number, self.accumulation_steps)
        batch = self._global_batch(number)
        rows = len(batch.samples) // (self.dp_world_size * accumulation_steps)
        first = (step * self.dp_world_size + self.dp_rank) * rows
        samples = batch.samples[first : first + rows]
        T, L, R = self.policy.shapes[batch.bucket]

        padded = {"frames": T, "reference_frames": R}
        channels = self.dataset.latent_channels
        arrays = {
            member.entry: self._empty(
                self._memory, rows, padded[member.length], member.width or channels
            )
            for member in members.ARRAYS
        }
        arrays_rows = zip(*(array.numpy() for array in arrays.values()))
        features_rows: Sequence[np.ndarray | None] = [None] * rows
        if self.features is not None:
            features = self._empty(self._features_memory, rows, L, self.features.width)
            # As integers of the same width: numpy has no bfloat16.
            bits = torch.int16 if features.dtype.itemsize == 2 else torch.int32
            features_rows = list(features.view(bits).numpy())
        text_ids = np.full((rows, L), self.tokenizer.pad_id, np.int64)
        text_bytes = np.zeros((rows, T), np.uint8) if self.text_bytes else [None] * rows
        teacher: Sequence[np.ndarray | None] = [None] * rows
        if self.teacher is not None:
            teacher_features = torch.zeros(rows, T, self.teacher.width, dtype=torch.float16)
            assert teacher_features.dtype == self.teacher.torch_dtype
            teacher = list(teacher_features.numpy())
        global_rows = np.arange(first, first + rows, dtype=np.int64)
        drop = self.tokenizer.dropped(self.order.seed, number, global_rows)
        lengths, used = [], []
        crops = self.order.crops(batch)[first : first + rows].tolist()
        words: list[list[int]] = [[]] * rows
        pieces: list[Piece] = []
        if self.references is not None:
            words = self.order.reference_words(batch, WORDS)[first : first + rows].tolist()
            for sample, row_words in zip(samples.tolist(), words):
                pieces += self.references.draw(row_words, sample, R)
        fetched = self._fetch(samples, pieces)
        into_rows = map(
            Row,
            arrays_rows,
            text_ids,
            features_rows,
            drop.tolist(),
            crops,
            words,
            text_bytes,
            teacher,
        )
        for row, (sample, into) in enumerate(zip(samples.tolist(), into_rows)):
            if self._closed:
                raise RuntimeError("the loader was closed")
            try:
                lengths.append(self._load_row(sample, fetched, into))
            except CorruptSampleError as error:
                sample, row_lengths = self._replace(batch, first + row, sample, error, into)
                lengths.append(row_lengths)
            used.append(sample)
        self.corrupt_samples.reads += rows
        frames, speaker_frames, tokens, n_bytes = np.array(lengths, np.int64).T.copy()

        # numpy for what is small: torch would start a thread pool in each loader thread.
        valid = np.arange(T) < frames[:, None]
        text_mask = np.arange(L) < tokens[:, None]
        input_dict = {
            "text_ids": text_ids,
            "text_mask": text_mask,
            "text_places": self.tokenizer.places(text_ids, text_mask),
            "speaker_mask": np.arange(R) < speaker_frames[:, None],
            "frames": frames,
            "global_batch": np.array(number, np.int64),
            "row": global_rows,
            "global_batch_size": np.array(len(batch.samples), np.int64),
        }
        input_dict = {name: self._tensor(array) for name, array in input_dict.items()}
        input_dict |= arrays
        input_dict |= {
            "sample_id": [self.dataset.sample_id(sample) for sample in used],
            "replaced": sum(map(int.__ne__, used, samples.tolist())),
            "accumulation_steps": accumulation_steps,
        }
        if self.features is not None:
            input_dict["text_features"] = features
        if self.teacher is not None:
            pinned = self.pin_memory
            input_dict["teacher_features"] = (
                teacher_features.pin_memory() if pinned else teacher_features
            )
        if self.text_bytes:
            input_dict["text_bytes"] = self._tensor(np.asarray(text_bytes))
            input_dict["aligns"] = self._tensor(n_bytes >= 0)
            input_dict["ctc_lengths"] = list(
                zip(frames.tolist(), n_bytes.clip(0).tolist(), strict=True)
            )
        labels = self._tensor(np.where(valid, np.int64(0), np.int64(IGNORE_INDEX)))
        return input_dict, labels

    def _replace(
        self, batch: GlobalBatch, row: int, sample: int, error: CorruptSampleError, into: Row
    ) -> tuple[int, tuple[int, int, int, int]]:
        """Fill `row` of the global batch with the replacement of a corrupt sample.

        Returns:
            The sample that was taken, and what `_load_row` returns for it.
        """
        for attempt in range(_MAX_REPLACEMENTS):
            if self.corrupt_samples.on_error == "raise":
                raise error
            self.corrupt_samples.count(self.dataset, sample, error)
            sample = self.order.replacement(batch, row, attempt)
            try:
                return sample, self._load_row(sample, self._fetch([sample]), into)
            except CorruptSampleError as next_error:
                error = next_error
        raise InputError(
            f"{_MAX_REPLACEMENTS} samples in a row are corrupt in the bucket of "
            f"{self.policy.edges[batch.bucket]} frames; restore the shards"
        )

    def _fetch(self, samples: Sequence[int] | np.ndarray, pieces: Sequence[Piece] = ()) -> Fetched:
        if not pieces:
            return Fetched(self.dataset.fetch(samples), {})
        others = [piece.sample for piece in pieces]
        return Fetched(*self.dataset.fetch_with_latents(samples, others))

    def _load_row(self, sample: int, fetched: Fetched, into: Row) -> tuple[int, int, int, int]:
        """Fill a row with `sample`; return how many frames, speaker frames and tokens are valid, and the
        text's bytes, or -1 where they are not asked for or cannot be aligned with the frames."""
        arrays, text_ids, features, drop, _, words, text_bytes, teacher = into
        pieces = []
        if self.references is not None:
            pieces = self.references.draw(words, sample, len(arrays[_REFERENCE]))
        loaded = self._load_sample(sample, fetched, into, stored_reference=not pieces)
        frames, speaker_frames = len(loaded.latents), len(loaded.reference)
        if pieces:
            speaker_frames = self._load_reference(sample, pieces, fetched, into)
        # A cropped sample is as long as what is left of it.
        loaded.metadata["target_duration"] = frames / self.frames_per_second
        stored = None if features is None else self._load_features(sample, features)
        try:
            tokens = self.tokenizer.encode_into(
                text_ids, loaded.metadata["text"], loaded.metadata, drop
            )
        except InputError as error:
            raise InputError(f"sample '{self.dataset.sample_id(sample)}': {error}") from error
        if stored not in (None, tokens):
            raise InputError(
                f"sample '{self.dataset.sample_id(sample)}': its text and conditions have {tokens} "
                f"tokens where its stored features are for {stored}; delete the folder of the "
                "features, and they are made again"
            )
        n_bytes = -1
        # A cropped sample speaks a part of its text only.
        is_whole = frames == self.dataset.frames[sample]
        if teacher is not None and self.teacher is not None and is_whole:
            self.teacher.read(sample, teacher.view(np.int16))
        if text_bytes is not None and is_whole:
            n_bytes = _write_bytes(loaded.metadata["text"], frames, text_bytes)
        return frames, speaker_frames, tokens, n_bytes

    def _load_sample(
        self, sample: int, fetched: Fetched, into: Row, stored_reference: bool = True
    ) -> LoadedSample:
        """A sample in its row, zero behind it. Without its stored reference that row's is left alone."""
        arrays = list(into.arrays)
        if not stored_reference:
            arrays[_REFERENCE] = arrays[_REFERENCE][:0]
        data = fetched.samples.get(sample)
        try:
            loaded = self.dataset.load(sample, arrays, data, into.crop)
        except CorruptSampleError:
            if data is None:
                raise
            # Perhaps the cache or the way here corrupted it: once more, from its origin.
            self.dataset.forget(sample)
            again = self.dataset.fetch([sample])[sample]
            loaded = self.dataset.load(sample, arrays, again, into.crop)
        for array, target in zip(loaded.arrays, arrays):
            target[len(array) :].fill(0)
        return loaded

    def _load_reference(
        self, sample: int, pieces: Sequence[Piece], fetched: Fetched, into: Row
    ) -> int:
        """Fill a row's reference with the joined pieces, or with the stored one where a piece is corrupt,
        and return its frames."""
        target, end = into.arrays[_REFERENCE], 0
        for piece in pieces:
            try:
                self._load_piece(piece, fetched, target[end:])
            except CorruptSampleError as error:
                if self.corrupt_samples.on_error == "raise":
                    raise
                self.corrupt_samples.count(self.dataset, piece.sample, error)
                return len(self._load_sample(sample, fetched, into).reference)
            end += piece.frames
        target[end:].fill(0)
        return end

    def _load_piece(self, piece: Piece, fetched: Fetched, target: np.ndarray) -> None:
        """A part of a drawn reference at the start of target (n, C)."""
        sample, data = piece.sample, fetched.latents.get(piece.sample)
        out = target[: piece.frames]
        try:
            self.dataset.load_latents(sample, out, piece.start, data)
        except CorruptSampleError:
            if data is None:
                raise
            self.dataset.forget(sample, latents_only=True)
            again = self.dataset.fetch_with_latents((), [sample])[1][sample]
            self.dataset.load_latents(sample, out, piece.start, again)

    def _load_features(self, sample: int, features: np.ndarray) -> int:
        """Fill features (L, h) and return their number of tokens, with those of conditioning."""
        assert self.features is not None
        first = self.tokenizer.n_conditions
        end = first + self.features.read(sample, features[first:])
        features[:first].fill(0)
        features[end:].fill(0)
        return end

    def _global_batch(self, number: int) -> GlobalBatch:
        # Several threads load micro-batches of one step; the order has state.
        with self._order_lock:
            batch = self._recent.get(number)
            if batch is None:
                full, part, divisor = self.ramp.place(number)
                batch = self.order.batch(full)
                rows = len(batch.samples) // divisor
                samples = batch.samples[part * rows : (part + 1) * rows]
                batch = replace(batch, number=number, samples=samples)
                self._recent[number] = batch
                if len(self._recent) > 4:
                    self._recent.popitem(last=False)
            return batch

    def _empty(self, memory: BufferPool, *shape: int) -> torch.Tensor:
        if self.pin_memory:  # torch reuses page-locked memory itself
            return torch.empty(shape, dtype=memory.dtype, pin_memory=True)
        return memory.tensor(*shape)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.pin_memory else tensor


def _write_bytes(text: str, frames: int, out: np.ndarray) -> int:
    """Write a text's utf-8 to the start of out and return its length; -1, and nothing written, where CTC
    cannot place it: each byte needs a frame of its own, and a blank between two equal ones."""
    values = np.frombuffer(text.encode(), np.uint8)
    if len(values) + np.count_nonzero(values[1:] == values[:-1]) > frames:
        return -1
    out[: len(values)] = values
    return len(values)
