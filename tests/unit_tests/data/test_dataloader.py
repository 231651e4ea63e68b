"""The loader: the same rows in the same steps however they are split, prefetched or resumed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from tests.helpers.loaders import (
    CHANNELS,
    assert_same,
    build,
    build_and_load,
    global_batches,
    joined,
    take,
)
from tests.helpers.tokens import byte_tokenizer
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.errors import InputError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"), 120, seed=7, channels=CHANNELS)


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


def test_padding_is_zero_where_memory_is_used_again(folder):
    """From the third batch on, as the loop holds one while the next is made."""
    for _, (inputs, labels) in zip(range(8), build(folder)):
        assert not inputs["latents"][labels == IGNORE_INDEX].any()
        valid = torch.arange(inputs["speaker"].shape[1]) < inputs["speaker_frames"][:, None]
        assert not inputs["speaker"][~valid].any()
        inputs["latents"].fill_(7)
        inputs["speaker"].fill_(7)


@pytest.mark.parametrize(
    "ranks, accumulation, workers, prefetch",
    [(1, 2, 0, 3), (4, 1, 1, 1), (2, 2, 3, 9)],
)
def test_any_split_is_the_same_global_batch(folder, ranks, accumulation, workers, prefetch):
    threads = dict(num_workers=workers, prefetch_batches=prefetch)
    split = global_batches(folder, ranks, accumulation, 10, **threads)
    for left, right in zip(global_batches(folder, 1, 1, 10), split, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("step, micro_batches", [(2, 5), (7, 14)])
def test_resume_under_another_split(folder, step, micro_batches):
    """In the middle of a step the state stands before it."""
    before = build(folder, ranks=2, rank=1, accumulation=2, num_workers=2, prefetch_batches=5)
    take(before, micro_batches)
    state = before.state_dict()
    assert state["global_batch"] == step and state == build_and_load(folder, state).state_dict()
    expected = global_batches(folder, 1, 1, step + 3)[step:]
    for ranks, accumulation, workers in ((1, 1, 0), (4, 1, 1), (1, 2, 2)):
        split = global_batches(folder, ranks, accumulation, 3, state, num_workers=workers)
        for left, right in zip(split, expected, strict=True):
            assert_same(left, right)


def test_given_batch_sizes(folder):
    """The budget's own sizes are the same order, also to a checkpoint; others are other batches on any
    split, and another order."""
    edges = {"bucket_frames": [24, 48, 200]}
    budget = build(folder, **edges)
    state = budget.state_dict()
    same = build_and_load(folder, state, **edges, bucket_batch_sizes=list(budget.order.batch_sizes))
    assert same.state_dict() == state
    assert_same(joined(take(same, 1)), joined(take(budget, 1)))
    sizes = {"bucket_batch_sizes": [20, 4, 8], **edges}
    assert build(folder, **sizes).order.batch_sizes == (20, 4, 8)
    whole = global_batches(folder, 1, 1, 10, **sizes)
    for ranks, accumulation in ((2, 1), (2, 2)):
        split = global_batches(folder, ranks, accumulation, 10, **sizes)
        for left, right in zip(split, whole, strict=True):
            assert_same(left, right)
    rows = {(batch["latents"].shape[1], len(batch["latents"])) for batch in whole}
    assert rows == {(24, 20), (48, 4), (200, 8)}
    saved = build(folder, **sizes).state_dict()
    assert build_and_load(folder, saved, **sizes).state_dict() == saved
    with pytest.raises(ValueError, match="its batch_sizes is .20, 4, 8. and .* bucket_batch_sizes"):
        build_and_load(folder, saved, **edges)


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
    "changes, sentence",
    [
        ({"seed": 1}, "its seed is 0 and this run's 1; restore .data. seed"),
        ({"batch_multiple": 1}, "its batch_sizes is"),
        (
            {"max_reference_ratio": 0.5},
            "its reference_frames is .48, 48, 48. and this run's .32, .* max_reference_ratio, or start",
        ),
        (
            {"max_text_tokens": 40, "bucket_frames": [32, 64, 200]},
            "restore .data. max_frames, max_text_tokens, on_too_long",
        ),
    ],
)
def test_another_order_is_refused_and_named(folder, changes, sentence):
    edges = {name: value for name, value in changes.items() if name == "bucket_frames"}
    saved = build(folder, **edges).state_dict()
    with pytest.raises(ValueError, match=sentence):
        build_and_load(folder, saved, **changes)


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


@pytest.mark.long
def test_the_interpreter_exits_with_batches_ahead(folder):
    code = (
        "import sys, tests.helpers.loaders as t\n"
        "it = iter(t.build(sys.argv[1], num_workers=2, prefetch_batches=8))\n"
        "next(it)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60, cwd=ROOT)
