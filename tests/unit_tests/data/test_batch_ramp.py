"""The batch ramp: every sample of the order once, whatever the split, and resumed exactly."""

import json

import pytest

from tests.helpers.loaders import (
    CHANNELS,
    assert_same,
    build,
    build_and_load,
    global_batches,
    take,
)
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.data.batch_ramp import BatchRamp
from torchtitan.models.dit_tts.errors import InputError

RAMP = {"ramp": (4, 2), "ramp_steps": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"), 60, seed=7, channels=CHANNELS)


@pytest.mark.parametrize("ramp", [BatchRamp(), BatchRamp((4, 2), 8), BatchRamp((6, 3, 2), 12)])
@pytest.mark.parametrize("accumulation", [1, 4, 6])
def test_closed_forms_by_counting(ramp, accumulation):
    """Against a count of one part after the other."""
    position = full = 0
    done = 0.0
    for number in range(60):
        place = ramp.place(number)
        assert ramp.global_batches(number) == pytest.approx(done)
        if place.part == 0:
            assert place.full == full and ramp.steps_before(full) == number
            full += 1
        assert place.full == full - 1
        assert ramp.first_micro_batch(number, accumulation) == position
        steps = ramp.accumulation(number, accumulation)
        for step in range(steps):
            assert ramp.of_micro_batch(position + step, accumulation) == (number, step)
        # No micro-batch is larger than in a complete global batch, and none is smaller than needed.
        assert steps * place.divisor >= accumulation > (steps - 1) * place.divisor
        position, done = position + steps, done + 1 / place.divisor
    phases = [ramp.place(number).divisor for number in range(60)]
    expected = [divisor for divisor in ramp.divisors for _ in range(ramp.steps)]
    assert phases == (expected + 60 * [1])[:60]


def test_parts_are_the_orders_global_batches(folder):
    loader = build(folder, **RAMP)
    batches = global_batches(folder, 1, 1, 20, **RAMP)
    ids = [batch["sample_id"] for batch in batches]
    names = [loader.dataset.sample_id(i) for i in range(len(loader.dataset))]
    for number in range(8):
        samples = [names[i] for i in loader.order.batch(number).samples]
        first = loader.ramp.steps_before(number)
        parts = loader.ramp.place(first).divisor
        assert sum(ids[first : first + parts], []) == samples
        assert {len(each) * parts for each in ids[first : first + parts]} == {len(samples)}
    for number, batch in enumerate(batches):
        # Keys of randomness of its own, and strata of times for each step.
        size = len(batch["sample_id"])
        assert batch["global_batch"] == number and batch["global_batch_size"] == size
        assert batch["row"].tolist() == list(range(size))


def test_any_split_and_resume(folder):
    whole = global_batches(folder, 1, 1, 22, **RAMP)
    for ranks, accumulation in ((1, 4), (2, 1), (2, 4), (1, 8)):
        split = global_batches(folder, ranks, accumulation, 22, **RAMP)
        for left, right in zip(split, whole, strict=True):
            assert_same(left, right)
    for step in (3, 8, 13, 17):
        before = build(folder, ranks=2, accumulation=4, **RAMP)
        taken = sum(before.ramp.accumulation(number, 4) for number in range(step))
        take(before, taken)
        state = before.state_dict()
        assert state["global_batch"] == step == before.global_batch
        for ranks, accumulation in ((1, 1), (2, 2)):
            split = global_batches(folder, ranks, accumulation, 3, state, **RAMP, num_workers=2)
            for left, right in zip(split, whole[step:], strict=False):
                assert_same(left, right)


def test_skipped_parts_are_left_out(folder):
    loader = build(folder, accumulation=4, **RAMP)
    loader.skipped = {1, 7, 8, 16}
    numbers = [int(inputs["global_batch"]) for inputs, _ in take(loader, 5 + 2 * 7 + 4)]
    assert (
        list(dict.fromkeys(numbers)) == [0, 2, 3, 4, 5, 6, *range(9, 16), 17][: len(set(numbers))]
    )
    ids = [[inputs["sample_id"] for inputs, _ in loader.micro_batches(n)] for n in (2, 12, 20)]
    assert list(map(len, ids)) == [1, 2, 4]
    loader.go_to(12)
    assert loader.global_batch == 12 and next(iter(loader))[0]["sample_id"] == ids[1][0]
    loader.go_to(6)
    resumed = build_and_load(folder, loader.state_dict(), accumulation=4, **RAMP)
    numbers = [int(inputs["global_batch"]) for inputs, _ in take(resumed, 6)]
    assert list(dict.fromkeys(numbers)) == [6, 9, 10, 11][: len(set(numbers))] and 9 in numbers


def test_another_ramp_is_refused_and_none_is_as_before(folder):
    state, plain = build(folder, **RAMP).state_dict(), build(folder).state_dict()
    for saved, changes in ((state, {}), (plain, RAMP), (state, RAMP | {"ramp_steps": 4})):
        with pytest.raises(InputError, match="its batch_ramp is .* restore .training. batch_ramp"):
            build_and_load(folder, saved, **changes)
    parts = json.loads(plain["order_fingerprint"])
    old = json.dumps(parts | {"order_version": 1})
    with pytest.raises(InputError, match="its order_version is 1 .* restore the version of this"):
        build_and_load(folder, plain | {"order_fingerprint": old})
    del parts["batch_ramp"]  # as an earlier version wrote it
    build_and_load(folder, plain | {"order_fingerprint": json.dumps(parts)})
