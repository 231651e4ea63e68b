"""The loader: the same rows in the same steps however they are split, prefetched or resumed."""

import json

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from tests.helpers.loaders import (
    CHANNELS,
    SKIP,
    build,
    build_and_load,
    split,
    take,
)
from tests.helpers.tokens import byte_tokenizer
from tools.harness.synthetic import flip_bits, make_samples
from torchtitan.models.dit_tts.data.collate import trim_padding
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.errors import InputError


def test_contents_of_a_batch(folder):
    loader = build(folder, max_reference_ratio=0.5)
    where = {loader.dataset.sample_id(i): i for i in range(len(loader.dataset))}
    shapes, starts = set(), []
    for number, (inputs, labels) in enumerate(take(loader, 12)):
        crops = loader.order.crops(loader.order.batch(number)).tolist()
        B, T, _ = inputs["latents"].shape
        L, R = inputs["text_ids"].shape[1], inputs["speaker"].shape[1]
        shapes.add((T, L, R))
        assert inputs["latents"].dtype == inputs["speaker"].dtype == torch.float32
        assert inputs["latents"].shape == (B, T, CHANNELS)
        assert inputs["speaker"].shape == (B, R, CHANNELS)
        assert inputs["global_batch_size"] == B and inputs["row"].tolist() == list(range(B))
        assert labels.dtype == torch.int64 and labels.shape == (B, T)
        for row, sample_id in enumerate(inputs["sample_id"]):
            sample = where[sample_id]
            latents, reference = map(torch.from_numpy, loader.dataset.read(sample))
            start = crops[row] % (len(reference) - R + 1) if len(reference) > R else 0
            starts.append(start)
            frames, reference = len(latents), reference[start : start + R]
            assert inputs["frames"][row] == frames
            assert torch.equal(inputs["latents"][row, :frames], latents)
            assert not inputs["latents"][row, frames:].any()
            assert labels[row].tolist() == [0] * frames + [IGNORE_INDEX] * (T - frames)
            assert torch.equal(inputs["speaker"][row, : len(reference)], reference)
            assert not inputs["speaker"][row, len(reference) :].any()
            assert inputs["speaker_frames"][row] == len(reference)
            ids = byte_tokenizer().encode(loader.dataset.metadata(sample)["text"])
            assert inputs["text_ids"][row].tolist() == ids + [0] * (L - len(ids))
            assert inputs["text_tokens"][row] == len(ids)
    assert shapes <= set(loader.policy.shapes) and len({R for _, _, R in shapes}) > 1
    assert len(set(starts)) > 10


PACKED = {"batching": "packed", "longest_per_row": 2, "max_speaker_frames": 64}
SETTINGS = {
    "buckets": {},
    "cropped references": {"max_reference_ratio": 0.5},
    "drawn references": {"references": "drawn"},
    "given edges": {"bucket_frames": [24, 48, 200]},
    "texts and weights": {"verbatim_fraction": 0.4, "use_sample_weights": True},
    "corrupt samples": SKIP,
    "captions, corrupt samples": {"max_caption_tokens": 7} | SKIP,
    "packed": PACKED,
    "packed, drawn references": PACKED | {"references": "drawn"},
    "packed, texts and weights": PACKED | {"verbatim_fraction": 0.4, "use_sample_weights": True},
    "packed, captions, corrupt samples": PACKED | {"max_caption_tokens": 7} | SKIP,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Valid samples with weights and second texts, and the same after a bit of four has flipped."""
    samples = make_samples(120, seed=7, channels=CHANNELS)
    for number, sample in enumerate(samples):
        if number % 2:
            sample.metadata["text_verbatim"] = f"eh {sample.metadata['text']}"
        sample.metadata["weight"] = 1 + number % 3
    made = [tmp_path_factory.mktemp(name) for name in ("valid", "corrupt")]
    for folder in made:
        for number in range(2):
            write_shard(folder / f"{number:06d}.tar", samples[number::2])
        build(folder)
    flip_bits(made[1] / "000000.tar", [3 * 5, 3 * 20 + 1, 3 * 33 + 2])
    flip_bits(made[1] / "000001.tar", [3 * 11])
    return made


@pytest.mark.parametrize("name", SETTINGS)
def test_any_split_and_any_resume_gives_the_same_global_batches(folders, name):
    folder, changes = folders["corrupt" in name], SETTINGS[name]
    steps = 32 if changes == PACKED else 12  # rows of a new group of epochs begin at the 29th
    whole = split(folder, 1, 1, steps, **changes)
    assert {sample[0] for sample in whole} == set(range(steps))
    for ranks, accumulation, workers in ((4, 1, 1), (2, 2, 3)):
        threads = dict(num_workers=workers, prefetch_batches=9)
        assert split(folder, ranks, accumulation, steps, **threads, **changes) == whole
    # In the middle of a step the state stands before it.
    for step, micro_batches in ((2, 5), (7, 14)):
        threads = dict(num_workers=2, prefetch_batches=5)
        before = build(folder, ranks=2, rank=1, accumulation=2, **threads, **changes)
        take(before, micro_batches)
        state = before.state_dict()
        assert state["global_batch"] == step
        assert build_and_load(folder, state, **changes).state_dict() == state
        for ranks, accumulation in ((1, 2), (4, 1)):
            resumed = split(folder, ranks, accumulation, steps - step, state, **changes)
            assert resumed == [sample for sample in whole if sample[0] >= step]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_made_before_the_load_does_not_replay(folder, workers):
    loader = build(folder, num_workers=workers)
    early = iter(loader)
    started = iter(loader)
    next(started)
    state = build(folder).state_dict() | {"global_batch": 6}
    loader.load_state_dict(state)
    assert next(early)[0]["global_batch"] == 6
    assert next(started)[0]["global_batch"] == 7
    assert next(iter(loader))[0]["global_batch"] == 8
    assert next(early)[0]["global_batch"] == 9


@pytest.mark.parametrize(
    "saved, changes, sentence",
    [
        ({}, {"seed": 1}, "its seed is 0 and this run's 1; restore .data. seed"),
        ({}, {"batch_multiple": 1}, "its batch_sizes is"),
        ({}, {"max_reference_ratio": 0.5}, "its reference_frames is .48, 48, 48. .* max_reference"),
        ({"bucket_frames": [64, 200]}, {"max_text_tokens": 40}, "restore .data. max_frames, max_t"),
        ({"references": "drawn"}, {"references": "stored"}, "its references is drawn .* restore"),
        (PACKED, {"longest_per_row": 1}, "its batching is .* restore .data. batching or longest_"),
        ({}, PACKED, "its batching is buckets .* restore .data. batching"),
    ],
)
def test_another_order_is_refused_and_named(folder, saved, changes, sentence):
    state = build(folder, **saved).state_dict()
    with pytest.raises(InputError, match=sentence):
        build_and_load(folder, state, **saved | changes)


def test_states_of_earlier_versions(folder):
    state = build(folder).state_dict()
    parts = json.loads(state["order_fingerprint"])

    def load(**others):
        build_and_load(folder, state | {"order_fingerprint": json.dumps(parts | others)})

    load(batch_ramp=[])
    with pytest.raises(InputError, match="with a batch ramp, which .* exclude_from_loading"):
        load(batch_ramp=[4, 2, 8])
    with pytest.raises(InputError, match="its order_version is 1 .* restore the version of this"):
        load(order_version=1)
    del parts["references"], parts["batching"]  # which there were none of
    load()


def test_skipped_global_batches_are_left_out(folder):
    loader = build(folder, accumulation=2)
    loader.skipped = {1, 3, 4}
    assert [int(inputs["global_batch"]) for inputs, _ in take(loader, 6)] == [0, 0, 2, 2, 5, 5]
    ids = [inputs["sample_id"] for inputs, _ in loader.micro_batches(4)]
    loader.go_to(4)
    assert len(ids) == 2 and loader.global_batch == 4
    resumed = build_and_load(folder, loader.state_dict(), accumulation=2)
    assert resumed.skipped == {1, 3, 4} and next(iter(resumed))[0]["global_batch"] == 5
    resumed.skipped.clear()
    resumed.go_to(4)
    assert [inputs["sample_id"] for inputs, _ in take(resumed, 2)] == ids


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_thread_reaches_the_consumer_and_skips_nothing(folder, workers, monkeypatch):
    loader = build(folder, num_workers=workers)
    bad = take(build(folder), 3)[2][0]["sample_id"][1]
    load = loader.dataset.load

    def failing(sample, *buffers):
        if loader.dataset.sample_id(sample) == bad:
            raise CorruptSampleError(f"sample '{bad}': disk gone")
        return load(sample, *buffers)

    iterator = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr(loader.dataset, "load", failing)
        next(iterator), next(iterator)
        with pytest.raises(InputError, match=f"sample '{bad}': disk gone"):
            next(iterator)
    assert next(iter(loader))[0]["global_batch"] == 2


@pytest.mark.parametrize("batching", [{}, PACKED], ids=["buckets", "packed"])
def test_captions_are_bytes_and_too_long_ones_are_cut(folder, batching):
    """The batch has 12 places for each sample; "très" has two bytes for its è."""
    loader, seen = build(folder, max_caption_tokens=12, **batching), set()
    where = {loader.dataset.sample_id(i): i for i in range(len(loader.dataset))}
    for batch, _ in take(loader, 6):
        assert batch["caption_ids"].shape == (len(batch["frames"]), 12)
        assert batch["caption_ids"].dtype == torch.int64
        for row, name in enumerate(batch["sample_id"]):
            caption = loader.dataset.metadata(where[name]).get("caption", "")
            wanted = list(caption.encode()[:12])
            seen.add((caption, len(wanted)))
            assert batch["caption_ids"][row].tolist() == wanted + [0] * (12 - len(wanted))
            assert batch["caption_tokens"][row] == len(wanted)
    assert ("", 0) in seen and ("a calm voice", 12) in seen
    assert ("a très vieille voice", 12) in seen
    assert "caption_ids" not in take(build(folder), 1)[0][0]
    [(batch, labels)] = take(build(folder, max_caption_tokens=40), 1)
    before, longest = batch["caption_ids"], int(batch["caption_tokens"].max())
    trim_padding(batch, labels)
    assert torch.equal(batch["caption_ids"], before[:, : -(-longest // 8) * 8])
    assert batch["caption_ids"].shape[1] < 40


def test_streams_end_with_their_longest_row(folder):
    cut = 0
    for batch, labels in take(build(folder), 8):
        before = dict(batch)
        trimmed = trim_padding(batch, labels)
        for name, lengths in (
            *(("latents", "frames"), ("speaker", "speaker_frames")),
            *(("text_ids", "text_tokens"), ("text_positions", "text_tokens")),
        ):
            end = -(-int(batch[lengths].max()) // 8) * 8
            assert torch.equal(batch[name], before[name][:, :end]), name
        assert trimmed.shape == batch["latents"].shape[:2]
        assert (trimmed == 0).sum() == (labels == 0).sum()
        cut += before["latents"].shape[1] - batch["latents"].shape[1]
    assert cut > 0
