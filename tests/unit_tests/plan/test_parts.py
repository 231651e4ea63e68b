"""titan-tts plan by hand: memory and seconds are sums of their parts, each part counted once."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.plan_cases import H200, debug_config, forecaster
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.benchmark.synthetic import BYTES_PER_SECOND, SyntheticDataset
from torchtitan.models.dit_tts.model.flops import Lengths, training_flops
from torchtitan.models.dit_tts.plan.activations import ActivationMemory
from torchtitan.models.dit_tts.plan.buckets import estimated_buckets
from torchtitan.models.dit_tts.plan.communication import (
    BACKWARD,
    FORWARD,
    TEXT_ENCODER,
    Collective,
    Communication,
)
from torchtitan.models.dit_tts.plan.constants import guesses
from torchtitan.models.dit_tts.plan.devices import cluster_of
from torchtitan.models.dit_tts.plan.forecast import Forecaster, forecast
from torchtitan.models.dit_tts.plan.forecast_report import forecast_lines
from torchtitan.models.dit_tts.plan.memory import MemoryNeed, capacity, states_total
from torchtitan.models.dit_tts.plan.profile import Profile, Shape, Work
from torchtitan.models.dit_tts.plan.states import DataParallelLayout, Gathered, StateMemory
from torchtitan.models.dit_tts.plan.step_time import (
    StepWork,
    copied_bytes,
    optimizer_bytes,
    step_time,
)

MIB, GIB = 2**20, 2**30

# Every part is another power of two, so that a sum tells which of them it has.
STATES = StateMemory(
    weights=1,
    gradients=2,
    optimizer=4,
    ema=8,
    gathered=Gathered(kept=16, in_turn=32),
    gradients_in_turn=64,
    encoder=128,
    encoder_gathered=Gathered(kept=256, in_turn=512),
    encoder_sharded=True,
    encoder_units=3,
    offloaded=False,
)
LASTING = 1 + 2 + 4 + 8


def test_states_are_the_sum_of_their_parts():
    assert states_total(STATES) == 1023
    # An encoder that every GPU has whole gathers nothing; offloaded states are not on the GPU.
    assert states_total(replace(STATES, encoder_sharded=False)) == 1023 - 256 - 512
    assert states_total(replace(STATES, offloaded=True)) == 1023 - LASTING


def test_a_micro_batch_fits_up_to_the_last_byte():
    need = MemoryNeed(1, ActivationMemory(batch=2, saved=4, working=8), capacity=15)
    assert need.total == 15 and need.fits
    assert not replace(need, capacity=14).fits


def test_capacity_leaves_room_for_context_and_fragments():
    # 1.5 GiB of context, and 4 % that the allocator cannot use.
    assert capacity(replace(H200, memory_gib=100.0)) == pytest.approx(94.5 * GIB, abs=1)


WORK = Work(
    product_seconds=np.array([1.0, 2.0]),
    block_share=0.5,
    attention_seconds=np.array([4.0, 8.0]),
    moving_seconds=np.array([16.0, 32.0]),
    fused_seconds=np.array([64.0, 128.0]),
    kernels=np.array([1000, 3000]),
)


class Kept:
    """What passes tell of memory: the same at every shape."""

    longest = Shape(2, 64, 40)

    def __init__(self, saved=0, rest=0, working=0):
        self._saved = saved
        self._rest = rest
        self._working = working

    def memory(self, name, shape):
        return {"saved": self._saved, "batch": 7, "working": self._working}[name]

    def saved(self, shape):
        return self._rest, self._saved

    @property
    def another_block(self):
        return self


def test_activations_are_those_of_every_block():
    """Three blocks keep 100 each, two checkpointed ones 10, and five of the speaker encoder 4."""
    args = replace(model_flavors()["debug"], speaker_n_layers=5)
    kinds = {"none": Kept(100, 1000, 50), "full": Kept(10, 1001, 60)}
    speaker = Kept(saved=20), Kept(saved=24)
    profile = Profile(args, {"none": 3, "full": 2}, lambda kind, shape: kinds[kind], speaker)
    # The first block of the speaker encoder is among what the decoder's blocks share.
    saved = 1001 + 3 * 100 + 2 * 10 + 4 * 4
    assert profile.memory(Shape(3, 32, 24)) == ActivationMemory(batch=7, saved=saved, working=60)


RATES = {
    "gemm_efficiency": 0.5,
    "attention_efficiency": 0.25,
    "memory_efficiency": 0.8,
    "fused_traffic": 1.5,
    "kernel_seconds": 1e-3,
    "encoder_slowdown": 2.0,
    "fp8_gain": 2.0,
    "network_efficiency": 1.0,
    "ring_step_seconds": 0.0,
}


def test_seconds_of_a_step_are_the_sum_of_its_parts():
    device = replace(H200, bandwidth=1e12, peak_tflops=1000)
    gather = Collective("all-gather", 0.0, 100.0, 30.0, 7, BACKWARD, 10)
    step = StepWork(
        device=device,
        micro_batch=WORK,
        accumulation=3,
        fp8=False,
        encoder_flops=1e15,
        copied_bytes=1e12,
        optimizer_bytes=2e12,
        communication=Communication((gather,)),
        model_flops=0.0,
    )
    constants = replace(guesses(), values=RATES)
    found = step_time(step, constants)
    assert found.computing == pytest.approx(
        {
            FORWARD: 3 * (1 / 0.5 + 4 / 0.25 + (16 + 1.5 * 64) / 0.8 + 1),
            BACKWARD: 3 * (2 / 0.5 + 8 / 0.25 + (32 + 1.5 * 128) / 0.8 + 3),
            TEXT_ENCODER: 3 * 1 / 0.5 * 2,
        }
    )
    expected = {
        "products": 3 * 3 / 0.5,
        "attention": 3 * 12 / 0.25,
        "pointwise": 3 * (48 + 1.5 * 192) / 0.8,
        "gaps between kernels": 3 * 4,
        "text encoder": 3 * 1 / 0.5 * 2,
        "copies of weights": 3 * 1 / 0.8,
        "optimizer": 2 / 0.8 + 400 * 1e-3,
        "exposed communication": 100 / 10,  # the first of ten units; the rest is hidden
    }
    assert found.parts == pytest.approx(expected)
    assert found.seconds == pytest.approx(sum(expected.values()))
    # In 8 bits the blocks' half of the products takes half the time.
    in_fp8 = step_time(replace(step, fp8=True), constants).parts
    assert in_fp8 == pytest.approx(expected | {"products": 3 * 3 / 0.5 * 0.75})


def test_what_computation_does_not_hide_is_exposed():
    gather = Collective("all-gather", 0.0, 100.0, 30.0, 7, BACKWARD, 10)
    exchanged = Communication((gather, replace(gather, name="reduce-scatter", units=20)))
    constants = replace(guesses(), values=RATES)
    # Both pass the same link; nine tenths of the backward pass hide what passes it meanwhile.
    for seconds, exposed in ((1000.0, 0.0), (200.0, 20.0), (100.0, 110.0)):
        computing = {FORWARD: 500.0, BACKWARD: seconds}
        found = exchanged.exposed(computing, constants)
        assert found == pytest.approx(100 / 10 + 100 / 20 + exposed)
        assert exchanged.overlaps(computing, constants) == (exposed == 0)


class ByHand:
    """A profile: each sample keeps 100 MiB for its reference and one for each frame, and products
    take as long as WORK's for each frame."""

    def work(self, device, shape):
        return replace(WORK, product_seconds=WORK.product_seconds * shape.frames)

    def memory(self, shape):
        return ActivationMemory(0, shape.samples * (100 + shape.frames) * MIB, 0)


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(Forecaster, "profile", lambda self, config, layout: ByHand())


def test_the_rates_of_a_step_are_those_of_all_gpus(by_hand):
    config = debug_config()
    planner = forecaster(config, gpus=2)
    lengths = Lengths(64, 40, 64)
    step = planner.step(config, DataParallelLayout(2, 1), lengths, samples=12, accumulation=3)
    seconds = step.seconds
    assert seconds.low < seconds.middle < seconds.high
    flops = 12 * training_flops(planner.args, lengths)
    for rate, amount in (
        (step.samples_per_second, 2 * 3 * 12),
        (step.mfu, 3 * flops / H200.peak_flops),
    ):
        expected = [amount / each for each in (seconds.high, seconds.middle, seconds.low)]
        assert [rate.low, rate.middle, rate.high] == pytest.approx(expected)
    assert step.flops.total == 2 * 3 * flops


def test_every_bucket_has_to_fit(by_hand):
    """Short utterances need more than long ones where their references are long: they decide."""
    arguments = ["--data.bucket_frames=32,64", "--benchmark.mean_seconds=1.0"]
    arguments += ["--compile.enable", "--compile.components=loss"]
    config = debug_config(*arguments, "--training.global_batch_size=16")
    states = states_total(forecast(config, cluster_of(H200, 1, 1), guesses()).states)

    def with_room_for(mib: int):
        needed = states + mib * MIB + 1.5 * GIB
        small = replace(H200, memory_gib=needed / 0.96 / GIB)
        return forecast(config, cluster_of(small, 1, 1), guesses())

    plan = with_room_for(3310)
    short, long = plan.buckets
    assert (short.bucket.micro_batch, long.bucket.micro_batch) == (32, 16)
    # 25 x 132 and 20 x 164 MiB; with 12 of the longest there are 24 of the short ones.
    assert (short.largest, long.largest, plan.largest) == (25, 20, 12)
    assert plan.longest.memory.fits and not plan.neediest.memory.fits
    assert plan.neediest.lengths.frames == 32 and plan.a_sample == 132 * MIB
    assert plan.neediest.memory.total == states + 32 * 132 * MIB
    said = "\n".join(forecast_lines(plan))
    assert "together" in said and "GiB  DOES NOT FIT" in said
    # What the loss alone compiles leaves the blocks eager.
    assert "; eager, activation checkpointing 'none'" in said
    assert with_room_for(20).largest == 0

    # A mean step is one of the buckets' steps, each as often as it comes.
    shares = np.array([short.bucket.share, long.bucket.share])
    seconds = np.array([short.step.seconds.middle, long.step.seconds.middle])
    flops = np.array([short.step.flops.total, long.step.flops.total], float)
    mean = shares @ seconds
    assert plan.mix_seconds.middle == pytest.approx(mean)
    assert plan.mix_mfu.middle == pytest.approx(shares @ flops / mean / H200.peak_flops)
    assert seconds[1] > 1.2 * seconds[0] and shares[0] < 0.4  # else a plain mean would do


@pytest.mark.parametrize("state_dtype, moments", [("float32", 16), ("bfloat16", 8), ("8bit", 4)])
@pytest.mark.parametrize("ema", [True, False])
def test_bytes_of_an_optimizer_step(state_dtype, moments, ema):
    """For each parameter: the gradient three times to clip it, weight and gradient three times, two
    moments read and written, and the EMA's two with the weight."""
    ema_flag = "--ema.enable" if ema else "--ema.no_enable"
    config = debug_config(f"--optimizer.state_dtype={state_dtype}", ema_flag)
    states = replace(STATES, gradients=4 * 1000)
    each = 3 * 4 + 3 * 4 + moments + (3 * 4 if ema else 0)
    assert optimizer_bytes(config, states) == pytest.approx(1000 * each)


def test_bytes_that_are_copied_beside_the_collectives():
    config = debug_config()
    n = 1000
    assert copied_bytes(config, n, DataParallelLayout(1, 1)) == 0
    # Into the copy that is computed on and out of it, read and written in float32.
    assert copied_bytes(config, n, DataParallelLayout(4, 1)) == n * 2 * (4 + 4)
    # Twice a float32 shard is cast to bfloat16 and the whole copied; a gradient is cast to float32.
    assert copied_bytes(config, n, DataParallelLayout(1, 4)) == n * (
        2 * ((4 + 2) / 4 + 2 + 2) + 2 + 4
    )


def test_buckets_have_as_many_steps_as_their_samples_fill():
    config = debug_config(
        "--data.bucket_frames=32,64",
        "--benchmark.mean_seconds=1.0",
        "--training.local_batch_size=16",
        "--training.global_batch_size=16",
    )
    short, long = estimated_buckets(config, 1)
    data = config.data
    frames = SyntheticDataset(config.benchmark, data, data.seed, BYTES_PER_SECOND, 2).frames
    samples = (frames <= 32).sum() / (frames > 32).sum()
    assert short.micro_batch == 2 * long.micro_batch
    assert short.share + long.share == pytest.approx(1)
    filled = [bucket.share * bucket.micro_batch for bucket in (short, long)]
    assert filled[0] / filled[1] == pytest.approx(samples)
    assert long.useful_frames == pytest.approx(frames[frames > 32].mean() / 64)
