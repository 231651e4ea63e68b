"""The loaders that benchmarks/loader.py compares: one job, the same padded batches.

Every contender but the plain copy gives ``(input_dict, labels)`` as our loader does (see
``LatentDataLoader``): rows of one length bucket, padded to its static shape, texts as ids of the byte
tokenizer, lengths and labels. webdataset knows no buckets, so its samples go through `BucketBatches`,
which keeps one open batch per bucket, widens each array straight into its row, and gives a batch out
when it is full: the same number of rows, the same padding and no copy more than ours.

It reads in the order in which the samples are stored, unshuffled, which is its fastest, and checks
nothing of what it reads. Ours draws its samples at random from the whole dataset and holds every byte
against its hash. The copy knows where everything lies, draws at random, and leaves texts out.
"""

import os
import tarfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchtitan.components.loss import IGNORE_INDEX

from benchmarks.synthetic_speech import CHANNELS
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.buckets import BatchPolicy
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary

Batch = tuple[dict[str, Any], torch.Tensor | None]
# (key, latents (T, C) float16, reference (R, C) float16, text)
Sample = tuple[str, np.ndarray, np.ndarray, str]
# One pass over the samples; called again for another.
Pass = Callable[[], Iterator[Batch]]

OURS = "titan-tts"
COPY = "plain copy"
WEBDATASET = "webdataset"


@dataclass(frozen=True)
class Archives:
    """The samples as every contender finds them."""

    tar_paths: list[str]
    """shards of triplets"""

    policy: BatchPolicy


# ---- ours


def make_ours(folder: Path, batch_size: int, workers: int) -> LatentDataLoader:
    """The loader as a training run makes it, with the default buckets and whole references."""
    config = JobConfig()
    config.data.path = str(folder)
    config.data.max_text_tokens = 448  # 30 s at 14 bytes per second
    config.data.max_reference_ratio = 0.0  # the others would need our drawn starts
    config.data.num_workers = workers
    config.training.local_batch_size = config.training.global_batch_size = batch_size
    return build_dataloader(1, 0, UnitTokenizer(Vocabulary()), config)


def ours(loader: LatentDataLoader, samples: int) -> Pass:
    """A pass continues in the endless order until as many rows were given as there are samples."""
    batches = iter(loader)

    def run() -> Iterator[Batch]:
        rows = 0
        while rows < samples:
            batch = next(batches)
            rows += len(batch[1])
            yield batch
            del batch  # as `timed` drops it, so that its memory is for the next one

    return run


# ---- webdataset


def webdataset_samples(tar_paths: list[str]) -> Callable[[], Iterable[Sample]]:
    import webdataset

    dataset = webdataset.WebDataset(tar_paths, shardshuffle=False).decode()

    def samples() -> Iterator[Sample]:
        for sample in dataset:
            yield sample["__key__"], sample["npy"], sample["ref.npy"], sample["json"]["text"]

    return samples


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


def in_data_loader(
    samples: Callable[[], Iterable[Sample]], policy: BatchPolicy, workers: int
) -> Pass:
    """Read through torch's DataLoader with persistent worker processes, as users of webdataset do."""
    loader = DataLoader(
        BucketBatches(samples, policy),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=2 if workers else None,
    )
    return lambda: iter(loader)


# ---- the lower bound


@dataclass(frozen=True)
class _Place:
    """Place of a sample's arrays: file descriptor, then (offset, frames) of each."""

    key: str
    descriptor: int
    latents: tuple[int, int]
    reference: tuple[int, int]


def plain_copy(archives: Archives, workers: int, seed: int) -> Pass:
    """Batches of latents and references alone, known offsets, nothing parsed and nothing checked.

    A batch holds random samples of one bucket. For each array: one ``preadv`` into a scratch buffer
    that stays in the processor's cache, one widening copy into the batch's row, zeros behind it.
    """
    batches = _random_batches(archives, seed)
    policy = archives.policy
    largest = max(G * max(T, R) for G, (T, _, R) in zip(policy.batch_sizes, policy.shapes))
    local = threading.local()

    def fill(job: tuple[int, list[_Place]]) -> Batch:
        bucket, places = job
        T, _, R = policy.shapes[bucket]
        if not hasattr(local, "scratch"):
            local.scratch = torch.empty(max(map(max, policy.shapes)), CHANNELS, dtype=torch.float16)
            local.memory = [torch.zeros(largest * CHANNELS) for _ in range(2)]
        scratch = local.scratch
        bytes_of_scratch = memoryview(scratch.numpy()).cast("B")
        batch = []
        for number, length in enumerate((T, R)):
            flat = local.memory[number][: len(places) * length * CHANNELS]
            batch.append(flat.view(len(places), length, CHANNELS))
        # Rows are cut by numpy: a slice of a tensor costs ten times as much.
        latents, speaker = (tensor.numpy() for tensor in batch)
        halves = scratch.numpy()
        for row, place in enumerate(places):
            arrays = (latents[row], place.latents), (speaker[row], place.reference)
            for rows, (offset, frames) in arrays:
                os.preadv(place.descriptor, [bytes_of_scratch[: frames * 2 * CHANNELS]], offset)
                torch.from_numpy(rows[:frames]).copy_(torch.from_numpy(halves[:frames]))
                rows[frames:].fill(0)
        keys = [place.key for place in places]
        return {"latents": batch[0], "speaker": batch[1], "sample_id": keys}, None

    if not workers:
        return lambda: map(fill, batches)
    pool = ThreadPoolExecutor(workers)

    def run() -> Iterator[Batch]:
        # Two ahead per thread, as a loader would; with kept memory the yielded rows are overwritten.
        ahead: deque = deque()
        for job in batches:
            ahead.append(pool.submit(fill, job))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    return run


def _random_batches(archives: Archives, seed: int) -> list[tuple[int, list[_Place]]]:
    """(bucket, places) of batches that hold every sample once, in random order."""
    places = [place for tar_path in archives.tar_paths for place in _find_arrays(tar_path)]
    generator = np.random.default_rng(seed)
    bucket_of = archives.policy.bucket_of(np.array([place.latents[1] for place in places]))
    batches = []
    for bucket, rows in enumerate(archives.policy.batch_sizes):
        numbers = generator.permutation(np.flatnonzero(bucket_of == bucket))
        for first in range(0, len(numbers), rows):
            batches.append((bucket, [places[number] for number in numbers[first : first + rows]]))
    return [batches[number] for number in generator.permutation(len(batches))]


def _find_arrays(tar_path: str) -> Iterator[_Place]:
    descriptor = os.open(tar_path, os.O_RDONLY)
    found: dict[str, dict[str, tuple[int, int]]] = {}
    with tarfile.open(tar_path) as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            if suffix.endswith("npy"):
                file = tar.extractfile(member)
                np.lib.format.read_magic(file)
                shape, _, _ = np.lib.format.read_array_header_1_0(file)
                found.setdefault(key, {})[suffix] = (member.offset_data + file.tell(), shape[0])
    for key, arrays in found.items():
        yield _Place(key, descriptor, arrays["npy"], arrays["ref.npy"])


def make_contenders(
    archives: Archives, folder: Path, batch_size: int, workers: int
) -> dict[str, Pass]:
    """Name -> pass, with this many threads (ours, the copy) or worker processes (webdataset)."""
    loader = make_ours(folder, batch_size, workers)
    return {
        WEBDATASET: in_data_loader(
            webdataset_samples(archives.tar_paths), archives.policy, workers
        ),
        OURS: ours(loader, len(loader.dataset)),
        COPY: plain_copy(archives, workers, 1),
    }
