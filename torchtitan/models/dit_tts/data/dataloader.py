"""The training data loader: micro-batches of one rank, and a state of a number.

Why not `StatefulDataLoader`, as upstream: moving a batch out of a worker process costs 5 to 7 times what loading it
here does, and its state cannot be loaded with another number of workers or ranks. Here threads read the files straight
into the batch, and the state is the number of the next global batch together with what the order depends on.
"""

import json
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.batch_sampler import ORDER_VERSION, GlobalBatchSampler
from torchtitan.models.dit_tts.data.buckets import BatchPolicy
from torchtitan.models.dit_tts.data.collate import Batch, Collator, PackedCollator
from torchtitan.models.dit_tts.data.corrupt_samples import CorruptSampleCounter
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy
from torchtitan.models.dit_tts.data.prefetch import ThreadPrefetcher
from torchtitan.models.dit_tts.data.references import DrawnReferences
from torchtitan.models.dit_tts.data.row_loader import RowLoader, Tokenizer
from torchtitan.models.dit_tts.errors import InputError

# What each part of the order's fingerprint is set by, for the message of a failed resume.
_SET_BY = {
    "dataset": "the shards of [data] path",
    "seed": "[data] seed",
    "order_version": "the version of this program",
    "batching": "[data] batching or longest_per_row",
    "bucket_frames": "[data] bucket_frames, num_buckets, max_frames, max_text_tokens or weights",
    "batch_sizes": "[training] global_batch_size or [data] batch_multiple",
    "references": "[data] references",
    "reference_frames": "[data] max_speaker_frames or max_reference_ratio",
    "samples": "[data] max_frames, max_text_tokens, verbatim_fraction, use_sample_weights, "
    "weights or balance_by",
}
_AFRESH = (
    'start the data from its beginning with [checkpoint] exclude_from_loading = ["dataloader"]'
)
# Parts that older checkpoints do not have, and what those were trained with.
_PARTS_ADDED = {"references": "stored", "batching": "buckets"}


class LatentDataLoader(BaseDataLoader):
    """Endless micro-batches of one data-parallel rank; `Collator` says what they hold.

    The rows of a global batch are cut into `accumulation_steps * dp_world_size` equal contiguous blocks; micro-batch m
    of rank r is block `m * dp_world_size + r`. Any split gives the same rows to the same step. The global batches whose
    numbers are in `skipped` are left out.

    Args:
        order: made from the batch sizes of `policy` over samples of `dataset`.
        references: draws references; None: those that are stored.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: GlobalBatchSampler,
        policy: BatchPolicy,
        tokenizer: Tokenizer,
        data: Data,
        *,
        dp_rank: int,
        dp_world_size: int,
        accumulation_steps: int,
        references: DrawnReferences | None = None,
    ):
        assert 0 <= dp_rank < dp_world_size and accumulation_steps > 0
        assert order.batch_sizes == policy.batch_sizes
        assert all(size % (dp_world_size * accumulation_steps) == 0 for size in policy.batch_sizes)
        self.dataset = dataset
        self.order = order
        self.policy = policy
        self.tokenizer = tokenizer
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.accumulation_steps = accumulation_steps
        self.num_workers = data.num_workers
        self.prefetch_batches = data.prefetch_batches
        self.frames_per_second = data.frames_per_second
        self.references = references
        # Micro-batches handed out. Prefetched ones do not count: a resume loads them again.
        self.consumed = 0
        self.skipped: set[int] = set()
        self.corrupt_samples = CorruptSampleCounter(data.on_error, data.max_corrupt_fraction)
        row_loader = RowLoader(dataset, tokenizer, self.corrupt_samples, data.frames_per_second)
        choices = torch.cuda.is_available(), data.verbatim_fraction, data.max_caption_tokens
        given = row_loader, policy.shapes, order, references, *choices
        is_packed, self._collator = False, Collator(*given)
        if isinstance(policy, PackedPolicy):
            is_packed, self._collator = True, PackedCollator(policy, data, *given)
        self._order_lock = threading.Lock()
        self._global_batch = lru_cache(4)(order.batch)
        self._order_parts = {
            "order_version": ORDER_VERSION,
            "dataset": dataset.fingerprint,
            "seed": order.seed,
            "batching": ["packed", data.longest_per_row] if is_packed else data.batching,
            "bucket_frames": list(policy.edges),
            "batch_sizes": list(policy.batch_sizes),
            "references": "stored" if references is None else "drawn",
            "reference_frames": [R for _, _, R in policy.shapes],
            "samples": order.samples_fingerprint(),
        }

    def __iter__(self) -> Iterator[Batch]:
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
        return self.consumed // self.accumulation_steps

    def go_to(self, number: int) -> None:
        """The next micro-batch is the first of this global batch."""
        self.consumed = number * self.accumulation_steps

    def micro_batches(self, number: int) -> Iterator[Batch]:
        """This rank's micro-batches of a global batch."""
        first = number * self.accumulation_steps
        yield from map(self.micro_batch, range(first, first + self.accumulation_steps))

    def close(self) -> None:
        """Stop prefetching, so that the process can end at once."""
        self._collator.close()

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank. Between two micro-batches of one step it points before that step."""
        return {
            "global_batch": self.global_batch,
            "skipped": json.dumps(sorted(self.skipped)),
            "order_fingerprint": json.dumps(self._order_parts, sort_keys=True),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved position; ranks, accumulation, workers and prefetch may all have changed."""
        if not state_dict:
            return
        saved = _PARTS_ADDED | json.loads(state_dict["order_fingerprint"])
        if saved.get("batch_ramp"):
            raise InputError(
                f"the checkpoint was trained with a batch ramp, which this version does not have; {_AFRESH}"
            )
        differing = [name for name, value in self._order_parts.items() if saved.get(name) != value]
        if differing:
            # The first is the cause: other shards or buckets change all that follows.
            name = differing[0]
            raise InputError(
                f"the checkpoint was trained on another order of the data: its {name} is "
                f"{saved.get(name)} and this run's {self._order_parts[name]}; restore {_SET_BY[name]}, or {_AFRESH}"
            )
        self.go_to(int(state_dict["global_batch"]))
        self.skipped = set(json.loads(state_dict["skipped"]))

    def _after_skipped(self, position: int) -> int:
        """The first micro-batch from `position` on whose global batch is not skipped."""
        number, step = divmod(position, self.accumulation_steps)
        if step or number not in self.skipped:
            return position
        while number in self.skipped:
            number += 1
        return number * self.accumulation_steps

    def micro_batch(self, position: int) -> Batch:
        """Micro-batch `position` of this rank, counted from the start of training. Thread-safe."""
        self._collator.check_open()
        number, step = divmod(position, self.accumulation_steps)
        # Several threads load micro-batches of one step; the order has state.
        with self._order_lock:
            batch = self._global_batch(number)
        rows = batch.rows // (self.dp_world_size * self.accumulation_steps)
        first = (step * self.dp_world_size + self.dp_rank) * rows
        return self._collator.collate(batch, first, rows)
