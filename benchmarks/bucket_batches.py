"""Padded batches of length buckets, from samples as the other libraries give them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchtitan.components.loss import IGNORE_INDEX

from benchmarks.synthetic_speech import CHANNELS
from torchtitan.models.dit_tts.data.buckets import BatchPolicy
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary

Batch = tuple[dict[str, Any], torch.Tensor | None]
# (key, latents (T, C) float16, reference (R, C) float16, text)
Sample = tuple[str, np.ndarray, np.ndarray, str]


class BucketBatches(IterableDataset):
    """Batches of what ``samples`` gives, by length bucket; the incomplete ones come at the end."""

    def __init__(self, samples: Callable[[], Iterable[Sample]], policy: BatchPolicy):
        self.samples = samples
        self.policy = policy
        self.tokenizer = UnitTokenizer(Vocabulary())

    def __iter__(self) -> Iterator[Batch]:
        edges = np.array(self.policy.edges)
        open_batches: dict[int, _OpenBatch] = {}
        for key, latents, reference, text in self.samples():
            bucket = int(edges.searchsorted(len(latents)))
            batch = open_batches.get(bucket)
            if batch is None:
                batch = open_batches[bucket] = _OpenBatch(
                    self.policy.batch_sizes[bucket], self.policy.shapes[bucket], self.tokenizer
                )
            batch.add(key, latents, reference, text)
            if len(batch.keys) == self.policy.batch_sizes[bucket]:
                yield open_batches.pop(bucket).close()
        for batch in open_batches.values():
            yield batch.close()


class _OpenBatch:
    """One padded batch while it is filled, row by row."""

    def __init__(self, rows: int, shape: tuple[int, int, int], tokenizer: UnitTokenizer):
        self.T, self.L, self.R = shape
        self.tokenizer = tokenizer
        self.keys: list[str] = []
        self.latents = torch.empty(rows, self.T, CHANNELS)
        self.speaker = torch.empty(rows, self.R, CHANNELS)
        self.text_ids = np.full((rows, self.L), tokenizer.pad_id, np.int64)
        self.frames, self.references, self.tokens = (np.zeros(rows, np.int64) for _ in range(3))

    def add(self, key: str, latents: np.ndarray, reference: np.ndarray, text: str) -> None:
        row = len(self.keys)
        self.keys.append(key)
        frames, references = len(latents), min(self.R, len(reference))
        self.latents[row, :frames].copy_(torch.from_numpy(latents))
        self.latents[row, frames:].zero_()
        self.speaker[row, :references].copy_(torch.from_numpy(reference[:references]))
        self.speaker[row, references:].zero_()
        self.tokens[row] = self.tokenizer.encode_into(self.text_ids[row], text)
        self.frames[row], self.references[row] = frames, references

    def close(self) -> Batch:
        n = len(self.keys)
        frames = self.frames[:n, None]
        labels = np.where(np.arange(self.T) < frames, np.int64(0), np.int64(IGNORE_INDEX))
        input_dict = {
            "latents": self.latents[:n],
            "speaker": self.speaker[:n],
            "text_ids": torch.from_numpy(self.text_ids[:n]),
            "text_tokens": torch.from_numpy(self.tokens[:n]),
            "speaker_frames": torch.from_numpy(self.references[:n]),
            "frames": torch.from_numpy(self.frames[:n]),
            "sample_id": self.keys,
        }
        return input_dict, torch.from_numpy(labels)
