"""Small loaders over synthetic shards, split over ranks, and their batches joined again."""

from types import SimpleNamespace

import torch

from tests.helpers.tokens import byte_tokenizer
from torchtitan.models.dit_tts.config.job_config import Data, Encoder, Training
from torchtitan.models.dit_tts.data.build import build_dataloader

CHANNELS = 8
SKIP = {"on_error": "skip", "max_corrupt_fraction": 0.1}


def config(folder, *, local=8, total=-1, ramp=(), ramp_steps=0, **changes):
    """What `build_dataloader` needs of a job config, with `changes` to `[data]`."""
    data = dict(path=str(folder), max_frames=200, max_speaker_frames=48, latent_channels=CHANNELS)
    data |= dict(num_buckets=3, num_workers=0, prefetch_batches=3, max_dropped_fraction=1.0)
    training = Training(local_batch_size=local, global_batch_size=total, steps=1)
    training.batch_ramp, training.batch_ramp_steps = list(ramp), ramp_steps
    return SimpleNamespace(data=Data(**(data | changes)), encoder=Encoder(), training=training)


def build(folder, ranks=1, rank=0, accumulation=1, tokenizer=None, **changes):
    """A global batch of 8 samples at the longest bucket, split over ranks and accumulation steps."""
    job = config(folder, local=8 // (ranks * accumulation), total=8, **changes)
    return build_dataloader(ranks, rank, tokenizer or byte_tokenizer(), job)


def build_and_load(folder, state, **changes):
    loader = build(folder, **changes)
    loader.load_state_dict(state)
    return loader


def take(loader, micro_batches):
    iterator = iter(loader)
    return [next(iterator) for _ in range(micro_batches)]


def joined(batches):
    """Micro-batches of one global batch as one dictionary with the labels, rows in their order."""
    merged = {}
    for name in batches[0][0]:
        if name == "accumulation_steps":  # of the split, and not of the batch
            continue
        values = [inputs[name] for inputs, _ in batches]
        if name == "sample_id":
            merged[name] = sum(values, [])
        elif name == "replaced":
            merged[name] = sum(values)
        elif values[0].ndim == 0:
            assert len({int(value) for value in values}) == 1
            merged[name] = values[0]
        else:
            merged[name] = torch.cat(values)
    merged["labels"] = torch.cat([labels for _, labels in batches])
    return merged


def global_batches(folder, ranks, accumulation, count, state=None, **changes):
    """So many global batches, from `state` on, each joined from its ranks and accumulation steps."""
    per_rank = []
    for rank in range(ranks):
        loader = build_and_load(
            folder, state or {}, ranks=ranks, rank=rank, accumulation=accumulation, **changes
        )
        per_rank.append(iter(take(loader, count * accumulation)))
    return [joined(micro_batches_of_one(per_rank)) for _ in range(count)]


def micro_batches_of_one(per_rank):
    """Those of one global batch from every rank, in the order of their rows."""
    first = [next(batches) for batches in per_rank]
    steps = first[0][0]["accumulation_steps"]
    return first + [next(batches) for _ in range(1, steps) for batches in per_rank]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        if name in ("sample_id", "replaced"):
            assert value == right[name]
        else:
            assert value.dtype == right[name].dtype and torch.equal(value, right[name]), name
