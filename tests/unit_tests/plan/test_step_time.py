"""Seconds of a step are the sum of their parts, each counted once; volumes are those of rings."""

from dataclasses import replace
from functools import cache

import pytest

from tests.helpers.plan_cases import H200, debug_config
from titan_tts.plan import step_time
from titan_tts.plan.devices import Cluster
from titan_tts.plan.parameters import model_sizes
from titan_tts.plan.states import DataParallelLayout, StateMemory, UnshardedWeights, state_memory
from titan_tts.plan.step_time import BACKWARD, FORWARD, GRADIENT_PRODUCTS, NOTHING, TEXT_ENCODER
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.model.flops import Lengths


@cache
def states_of(layout: DataParallelLayout) -> StateMemory:
    config = debug_config()
    return state_memory(config, model_sizes(config).args, None, layout)


def collectives(layout, accumulation=1, nodes=8, arguments=(), **changes):
    config, states = debug_config(*arguments), replace(states_of(layout), **changes)
    cluster = Cluster(H200, 8, nodes)
    return step_time.communication(config, 10**9, states, layout, cluster, accumulation)


@pytest.mark.long
def test_volumes_are_those_of_ring_collectives():
    """3B at 64 ranks: all-gather 3.88 and reduce-scatter 4.01 bytes per parameter were measured, with
    units that stay gathered and the padding of shards; HSDP reduces 4 / shards over replicas per step."""
    n = 10**9
    found = {}
    for layout in (DataParallelLayout(1, 64), DataParallelLayout(8, 8), DataParallelLayout(64, 1)):
        found[layout.name] = {c.name: c.volume / n for c in collectives(layout, accumulation=2)}
        if layout.sharded:
            kept = states_of(layout).gathered.kept
            gathered = sum(v for name, v in found[layout.name].items() if "gather" in name)
            others = (layout.shards - 1) / layout.shards
            assert gathered == pytest.approx(2 * others * (4 - kept / n))
            assert found[layout.name]["reduce-scatter"] == pytest.approx(2 * others * 4)
    assert found["HSDP"]["all-reduce"] == pytest.approx(2 * 7 / 8 * 4 / 8)
    # DDP reduces once a step, whatever the accumulation.
    assert found["DDP"]["all-reduce"] == pytest.approx(2 * 63 / 64 * 4)
    # A sharded text encoder is gathered in each micro-batch.
    sharded = {"encoder": int(2 * 3.88e9 / 16), "encoder_units": 35}
    each = collectives(DataParallelLayout(1, 16), accumulation=8, nodes=2, **sharded)
    [encoder] = [each for each in each if each.beside == TEXT_ENCODER]
    assert encoder.volume == pytest.approx(8 * 2 * 3.88e9 * 15 / 16, rel=1e-6)  # 54 GiB


@pytest.mark.long
def test_volumes_and_rings_of_the_options():
    """Of 10^9 parameters on 64 ranks; a ring passes 63/64 of them in 63 steps for each unit."""
    keys = ["--training.mixed_precision_reduce=bfloat16"]
    keys.append("--parallelism.fsdp_reshard_after_forward=never")
    states = {"gathered": UnshardedWeights(kept=2 * 10**9, transient=0), "units": 20}
    n, steps = 10**9 * 63 / 64, 20 * 63
    for layout, expected in (
        # Gathered once a step, reduced in each of three micro-batches.
        (DataParallelLayout(1, 64), [(2 * n, steps), (0, 0), (3 * 2 * n, 3 * steps)]),
        (DataParallelLayout(64, 1), [(2 * 2 * n, 2 * steps)]),
    ):
        found = collectives(layout, 3, arguments=keys, **states)
        assert [(each.volume, each.ring_steps) for each in found] == expected


@pytest.mark.long
def test_links_are_busy_at_once_and_streams_side_by_side():
    between = 8 * 50e9
    [ddp] = collectives(DataParallelLayout(64, 1))
    assert ddp.network_seconds == pytest.approx(8e9 * 63 / 64 / between)  # over the network cards
    # Under HSDP weights pass the links inside nodes and gradients of shards those between.
    hsdp = collectives(DataParallelLayout(8, 8))
    inside = sum(each.link_seconds for each in hsdp if each.beside == BACKWARD)
    outside = sum(each.network_seconds for each in hsdp)
    assert inside > 0 and outside == pytest.approx(8 * 1e9 * 7 / 8 / between)
    longest = max(each.seconds for each in hsdp if each.beside == BACKWARD)
    without_ends = [replace(each, end=0.0) for each in hsdp]
    expected = max(inside / 0.75, outside / 0.75, longest)
    assert step_time.busy_seconds(without_ends, BACKWARD) == expected
    # Ten units, two micro-batches, 63 steps of a ring, each with its delay.
    fsdp = collectives(DataParallelLayout(1, 64), accumulation=2, units=10)
    [forward] = [each for each in fsdp if each.beside == FORWARD]
    delays = 2 * 10 * 63 * 3e-6
    assert forward.seconds == pytest.approx(forward.network_seconds / 0.75 + delays)


def test_communication_that_computation_does_not_hide_is_exposed():
    gather = step_time.Collective("all-gather", 0.0, 75.0, 30.0, 0, BACKWARD, 1, 0.1)
    both = (gather, replace(gather, name="reduce-scatter", end=0.05))
    # Each passes the same link in 100 s, 90 and 95 s of it beside computation, which hides nine tenths of its time.
    for seconds, uncovered in ((1000.0, 0.0), (200.0, 5.0), (100.0, 95.0)):
        computing = {FORWARD: 500.0, BACKWARD: seconds}
        assert step_time.exposed_seconds(both, computing, 1) == pytest.approx(10 + 5 + uncovered)
    # In each of two micro-batches 50 s are reduced, of which 47.5 hide behind 90; the first also gathers 90.
    both = (gather, replace(both[1], micro_batches=2))
    found = step_time.exposed_seconds(both, {FORWARD: 0.0, BACKWARD: 200.0}, 2)
    assert found == pytest.approx(10 + 5 + 90 + 47.5 - 90)


LENGTHS, BLOCKS = Lengths(100, 20, 40), {"none": 12, "full": 20}
FRAMES, CONDITIONS = 3 * 2 * 100 * 2560, 3 * 2 * (20 + 10) * 1024
"""bytes of three samples"""


def test_sums_of_tensor_parallelism_hide_behind_nothing():
    """Of two groups of two GPUs: per micro-batch two sums a block forward, two more where it is computed
    again, two backward, and one of the conditions."""
    config, args = debug_config(), model_flavors()["3B"]
    layout = DataParallelLayout(2, 1, tensor=2)
    sums = step_time.tensor_sums(config, args, 3, LENGTHS, layout, BLOCKS)
    assert [each[1:] for each in sums] == [
        (NOTHING, 104, FRAMES, 2),
        (GRADIENT_PRODUCTS, 64, FRAMES, 2),
        (NOTHING, 1, CONDITIONS, 2),
    ]
    assert step_time.tensor_sums(config, args, 3, LENGTHS, DataParallelLayout(4, 1), {}) == []
    states, cluster = states_of(DataParallelLayout(1, 1)), Cluster(H200, 4, 1)
    found = step_time.communication(config, 10**9, states, layout, cluster, 2, sums)
    named = {each.name: each for each in found}
    forward, backward = (named[f"all-reduce, TP {each}"] for each in ("forward", "backward"))
    assert forward.volume == 2 * 104 * FRAMES  # of two ranks each sends and gets a half twice
    assert forward.network_seconds == 0 < forward.link_seconds
    assert backward.volume == 2 * 64 * FRAMES and backward.ring_steps == 2 * 2 * 64
    alone = named["all-reduce, TP conditions"].seconds + forward.seconds
    ends = named["all-reduce"].seconds * states.first + backward.seconds / 64
    uncovered = 63 / 64 * backward.seconds - 0.9 * backward.link_seconds
    for products, more in ((1e9, 0), (backward.link_seconds, uncovered)):
        hidden = {FORWARD: 1e9, BACKWARD: 1e9, GRADIENT_PRODUCTS: products}
        assert step_time.exposed_seconds(found, hidden, 2) == pytest.approx(alone + ends + more)


def test_sequence_parallelism_gathers_and_divides():
    """Of groups of four GPUs: two of each a block forward, again where it is computed again, and three gathers
    and one division backward, of which one pair hides behind products; frames leave and enter the blocks.
    Pointwise bytes of four tensors of a block's nine and three are divided."""
    config = debug_config()
    config.megatron.sequence_parallel = True
    args, layout = model_flavors()["3B"], DataParallelLayout(1, 1, tensor=4)
    sums = step_time.tensor_sums(config, args, 3, LENGTHS, layout, BLOCKS)
    assert [each[1:] for each in sums] == [
        (NOTHING, 2 * 32 + 2 * 20 + 1, FRAMES, 1),
        (NOTHING, 2 * 32 + 2 * 20, FRAMES, 1),
        (NOTHING, 2 * 32 + 1, FRAMES, 1),
        (GRADIENT_PRODUCTS, 4 * 32, FRAMES, 1),
        (NOTHING, 32, 3 * 2 * 6 * 2560, 2),
        (NOTHING, 1, CONDITIONS, 2),
    ]
    cluster = Cluster(H200, 8, 1)
    found = step_time.communication(config, 10**9, states_of(layout), layout, cluster, 2, sums)
    assert found[3].volume == 2 * 4 * 32 * FRAMES * 3 / 4
    product = 2 * 100 * 2560 * (4 * 2560 + 2 * args.mlp_dim) / 4
    assert step_time.gradient_product_flops(config, args, 100, 4) == 2 * 32 * product
    for sequence, others in ((False, 4), (True, 1)):
        size = 2 * 100 * ((5 * 2560 + 3 * args.mlp_dim) / 4 + others * 2560)
        work = step_time.pointwise_work(args, 100, {"none": 32}, True, 4, sequence)
        assert work == (pytest.approx(32 * 5.4 * size), 32 * 46)


def test_seconds_of_a_step_are_the_sum_of_its_parts():
    device = replace(H200, bandwidth=1e12, peak_tflops=1000)
    work = dict(accumulation=3, flops=6e15, encoder_flops=1e15, pointwise_bytes=9e12, kernels=1.5e6)
    work |= dict(copied_bytes=1e12, optimizer_bytes=2e12)
    gather = step_time.Collective("all-gather", 0, 75.0, 30.0, 0, BACKWARD, 3, 0.1)
    work["communication"] = (gather,)
    factor = step_time.Factor(2.0, 0.25, "test")
    found = step_time.step_time(device, factor, fp8=False, **work)
    launches = 1.5e6 * 2e-6
    model = 2 * 3 * (6 + 9 + launches)
    expected = {
        "matmuls and attention": 2 * 3 * 6,
        "pointwise kernels": 2 * 3 * 9,
        "kernel launches": 2 * 3 * launches,
        "text encoder": 2 * 3 * 1,
        "copies of weights": 2 * 3 * 1,
        "optimizer": 2 * 2,
        "exposed communication": 100 / 10 + 90 - 0.9 * 2 * model / 3,
    }
    assert found == pytest.approx(expected)
    in_fp8 = step_time.step_time(device, factor, fp8=True, **work)
    assert in_fp8["matmuls and attention"] == pytest.approx(2 * 3 * 6 / 1.4)
    assert in_fp8["text encoder"] == expected["text encoder"]


def test_the_error_is_the_factors():
    seconds = step_time.with_error(10.0, step_time.Factor(2.0, 0.25, "test"))
    assert seconds == step_time.Interval(8.0, 10.0, 12.5)
    assert step_time.rate(100.0, seconds) == step_time.Interval(8.0, 10.0, 12.5)


def test_bytes_that_checkpointing_moves_again():
    """The 800M's block moves 174 MiB per sample compiled and 676 eager, as speed_gates.json has it."""
    args = model_flavors()["800M"]
    fractions = {"none": 0, "memory_budget": 0.06, "selective": 1 / 6, "full": 1 / 3}
    for kind, moved in fractions.items():
        found, kernels = step_time.pointwise_work(args, 768, {kind: 24}, True)
        assert found == pytest.approx(24 * (1 + moved) * 174 * 2**20, rel=0.01)
        assert kernels == pytest.approx(24 * (1 + moved) * 46)
    eager, _ = step_time.pointwise_work(args, 768, {"none": 24}, False)
    assert eager == pytest.approx(24 * 676 * 2**20, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    "state_dtype, moments, ema", [("float32", 16, 1), ("bfloat16", 8, 2), ("8bit", 4, 0)]
)
def test_bytes_of_an_optimizer_step(state_dtype, moments, ema):
    """For each parameter: the gradient three times to clip it, weight and gradient three times, two
    moments read and written, and each of `ema` averages twice with the weight."""
    ema_flag = f"--ema.decays={','.join(['0.9', '0.99'][:ema])}" if ema else "--ema.no_enable"
    config = debug_config(f"--optimizer.state_dtype={state_dtype}", ema_flag)
    states = states_of(DataParallelLayout(1, 1))
    each = 3 * 4 + 3 * 4 + moments + 3 * 4 * ema
    assert step_time.optimizer_bytes(config, states) == pytest.approx(states.gradients / 4 * each)


def test_bytes_that_are_copied_in_addition_to_the_collectives():
    config = debug_config()
    n = 1000
    assert step_time.copied_bytes(config, n, DataParallelLayout(1, 1), 2) == 0
    # Once in two micro-batches into the copy that is computed on, and out of it, read and written in float32.
    assert step_time.copied_bytes(config, n, DataParallelLayout(4, 1), 2) == n * (4 + 4) * 1.5
    # Twice a float32 shard is cast to bfloat16 and the whole copied; a gradient is cast to float32.
    weights, sharded = (4 + 2) / 4 + 2 + 2, DataParallelLayout(1, 4)
    assert step_time.copied_bytes(config, n, sharded, 2) == n * (2 * weights + 2 + 4)
    config.parallelism.fsdp_reshard_after_forward = "never"
    assert step_time.copied_bytes(config, n, sharded, 2) == n * (weights / 2 + 2 + 4)
