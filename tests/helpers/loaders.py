"""Small loaders over synthetic shards, split over ranks, and their batches joined again."""

import hashlib
from types import SimpleNamespace

from tests.helpers.tokens import byte_tokenizer
from torchtitan.models.dit_tts.config.job_config import Data, Encoder, Training
from torchtitan.models.dit_tts.data.build import build_dataloader

CHANNELS = 8
SKIP = {"on_error": "skip", "max_corrupt_fraction": 0.1}


def order_digest(order, batches):
    """A hash of all that the first global batches of an order take, and of what is drawn for them."""
    found = hashlib.sha256()
    for number in range(batches):
        batch = order.batch(number)
        for each in (batch.samples, order.crops(batch), order.reference_words(batch, 6)):
            found.update(each.astype("<u8").tobytes())
        found.update(f"{batch.epoch} {batch.bucket} {order.replacement(batch, 1, 2)}".encode())
        if batch.starts is not None:
            found.update(batch.starts.astype("<i8").tobytes())
    return found.hexdigest()[:16]


def config(folder, *, local=8, total=-1, **changes):
    """What `build_dataloader` needs of a job config, with `changes` to `[data]`."""
    data = dict(path=str(folder), max_frames=200, max_speaker_frames=48, latent_channels=CHANNELS)
    data |= dict(num_buckets=3, num_workers=0, prefetch_batches=3, max_dropped_fraction=1.0)
    training = Training(local_batch_size=local, global_batch_size=total, steps=1)
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


def samples_of(batches):
    """(global batch, row, id, entries) of each sample in some micro-batches, in their order: every row of a padded
    batch with its padding, the valid part of a packed one."""
    found = []
    for inputs, labels in batches:
        rows = inputs | {"labels": labels}
        size, begins = int(inputs["global_batch_size"]), dict.fromkeys(_LENGTHS, 0)
        for place, name in enumerate(inputs["sample_id"]):
            entries = [size]
            for entry in sorted(name for name, each in rows.items() if getattr(each, "ndim", 0)):
                value, lengths = rows[entry], _LENGTH_OF.get(entry)
                if "longest" in inputs and lengths is not None:
                    begin = begins[lengths]
                    part = value[0, begin : begin + int(inputs[lengths][place])]
                else:
                    part = value[place]
                entries.append((entry, part.dtype, part.numpy().tobytes()))
            for lengths, patch in _LENGTHS.items():
                begins[lengths] += -(-int(inputs[lengths][place]) // patch) * patch
            found.append((int(inputs["global_batch"]), int(inputs["row"][place]), name, entries))
    return sorted(found, key=lambda sample: sample[:2])


_LENGTHS = {"frames": 1, "text_tokens": 1, "speaker_frames": 4}
"""entries with lengths, and what each of those is rounded up to in a packed row"""
_LENGTH_OF = {"latents": "frames", "labels": "frames", "speaker": "speaker_frames"}
_LENGTH_OF |= {"text_ids": "text_tokens", "text_positions": "text_tokens"}


def split(folder, ranks, accumulation, steps, state=None, **changes):
    """`samples_of` so many global batches, from `state` on, that these ranks load in so many micro-batches each."""
    batches = []
    for rank in range(ranks):
        given = dict(ranks=ranks, rank=rank, accumulation=accumulation, **changes)
        batches += take(build_and_load(folder, state or {}, **given), steps * accumulation)
    return samples_of(batches)
