"""Small loaders over synthetic shards, split as a test wants, and their batches put together again."""

from types import SimpleNamespace

import torch

from torchtitan.models.dit_tts.config.job_config import Data, Encoder
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.text.tokenizer import byte_tokenizer

CHANNELS = 8
SKIP = {"on_error": "skip", "max_corrupt_fraction": 0.1}


def config(folder, *, local=8, total=-1, **changes):
    data = dict(
        path=str(folder),
        max_frames=200,
        max_speaker_frames=48,
        num_buckets=3,
        num_workers=0,
        prefetch_batches=3,
        latent_channels=CHANNELS,
        max_dropped_fraction=1.0,
    )
    data.update(changes)
    training = SimpleNamespace(local_batch_size=local, global_batch_size=total, steps=1)
    return SimpleNamespace(data=Data(**data), encoder=Encoder(), training=training)


def build(folder, ranks=1, rank=0, accumulation=1, **changes):
    """A global batch of 8 samples at the longest bucket, split over ranks and accumulation steps."""
    local = 8 // (ranks * accumulation)
    return build_dataloader(
        ranks, rank, byte_tokenizer(), config(folder, local=local, total=8, **changes)
    )


def take(loader, micro_batches):
    iterator = iter(loader)
    return [next(iterator) for _ in range(micro_batches)]


def joined(batches):
    """Micro-batches of one global batch as one dictionary with the labels, rows in their order."""
    merged = {}
    for name in batches[0][0]:
        values = [inputs[name] for inputs, _ in batches]
        if name == "sample_id":
            merged[name] = [sample_id for ids in values for sample_id in ids]
        elif name == "replaced":
            merged[name] = sum(values)
        elif values[0].ndim == 0:
            assert len({int(value) for value in values}) == 1
            merged[name] = values[0]
        else:
            merged[name] = torch.cat(values)
    merged["labels"] = torch.cat([labels for _, labels in batches])
    return merged


def global_batches(folder, ranks, accumulation, count, **changes):
    loaders = [build(folder, ranks, rank, accumulation, **changes) for rank in range(ranks)]
    per_rank = [take(loader, count * accumulation) for loader in loaders]
    return [
        joined(
            [
                per_rank[rank][k * accumulation + m]
                for m in range(accumulation)
                for rank in range(ranks)
            ]
        )
        for k in range(count)
    ]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        if name in ("sample_id", "replaced"):
            assert value == right[name]
        else:
            assert value.dtype == right[name].dtype and torch.equal(value, right[name]), name
