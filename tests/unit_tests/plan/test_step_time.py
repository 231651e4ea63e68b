"""titan-tts plan: exchanges, seconds and error bars, and constants fitted to measured runs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.plan_cases import H200, debug_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan.calibrate import Observation, fit
from torchtitan.models.dit_tts.plan.communication import (
    BACKWARD,
    FORWARD,
    TEXT_ENCODER,
    Communication,
    communication,
)
from torchtitan.models.dit_tts.plan.constants import (
    CONSTANTS,
    NAMES,
    UNEXPLAINED,
    Constants,
    guesses,
    load,
    save,
)
from torchtitan.models.dit_tts.plan.devices import cluster_of
from torchtitan.models.dit_tts.plan.measured_runs import read_runs
from torchtitan.models.dit_tts.plan.parameters import model_sizes
from torchtitan.models.dit_tts.plan.profile import Work
from torchtitan.models.dit_tts.plan.states import DataParallelLayout, state_memory
from torchtitan.models.dit_tts.plan.step_time import StepWork, step_time, with_error

pytestmark = pytest.mark.usefixtures("remembered_passes")


def with_values(**values: float) -> Constants:
    known = guesses()
    return replace(known, values={**known.values, **values})


FULL_RATES = with_values(network_efficiency=1.0, ring_step_seconds=0.0)


# Communication


def exchanged(
    layout: DataParallelLayout,
    accumulation: int = 1,
    nodes: int = 8,
    parameters: int = 10**9,
    **changes,
) -> Communication:
    config = debug_config()
    states = replace(state_memory(config, model_sizes(config).args, None, layout), **changes)
    cluster = cluster_of(H200, 8 * nodes, 8)
    return communication(config, parameters, states, layout, cluster, 10, accumulation)


@pytest.mark.long
def test_volumes_are_those_of_ring_collectives():
    """3B at 64 ranks: all-gather 3.88 and reduce-scatter 4.01 bytes a parameter were measured, with the
    units that stay whole and the padding of shards; HSDP reduces 4 / shards over replicas, once a step."""
    n = 10**9
    config = debug_config()
    found = {}
    for layout in (DataParallelLayout(1, 64), DataParallelLayout(8, 8), DataParallelLayout(64, 1)):
        each = exchanged(layout, accumulation=2)
        found[layout.name] = {c.name: c.volume / n for c in each.collectives}
        if layout.sharded:
            kept = state_memory(config, model_sizes(config).args, None, layout).gathered.kept
            gathered = sum(v for name, v in found[layout.name].items() if "gather" in name)
            share = (layout.shards - 1) / layout.shards
            assert gathered == pytest.approx(2 * share * (4 - kept / n))
            assert found[layout.name]["reduce-scatter"] == pytest.approx(2 * share * 4)
    assert found["HSDP"]["all-reduce"] == pytest.approx(2 * 7 / 8 * 4 / 8)
    # DDP exchanges once a step, whatever the accumulation.
    assert found["DDP"]["all-reduce"] == pytest.approx(2 * 63 / 64 * 4)


@pytest.mark.long
def test_links_are_busy_at_once_and_streams_side_by_side():
    between = 8 * 50e9
    ddp = exchanged(DataParallelLayout(64, 1))
    seconds = ddp.busy(BACKWARD, FULL_RATES)
    assert seconds == pytest.approx(8e9 * 63 / 64 / between)  # a flat ring over the network cards
    assert ddp.overlaps({BACKWARD: seconds / 0.9}, FULL_RATES)
    assert not ddp.overlaps({BACKWARD: seconds}, FULL_RATES)
    # Under HSDP weights pass the links inside nodes and gradients of shards those between.
    hsdp = exchanged(DataParallelLayout(8, 8))
    inside = sum(each.link_seconds for each in hsdp.collectives if each.beside == BACKWARD)
    outside = sum(each.network_seconds for each in hsdp.collectives)
    assert inside > 0 and outside == pytest.approx(8 * 1e9 * 7 / 8 / between)
    assert hsdp.busy(BACKWARD, FULL_RATES) == pytest.approx(max(inside, outside))
    # Replicas exchange once a step: from two micro-batches on that is less than FSDP2's on the network.
    twice = [
        exchanged(layout, 2).busy(BACKWARD, FULL_RATES)
        for layout in (DataParallelLayout(8, 8), DataParallelLayout(1, 64))
    ]
    assert twice[0] < twice[1]


@pytest.mark.long
def test_each_step_of_a_ring_takes_its_delay():
    slow = with_values(network_efficiency=1.0, ring_step_seconds=1.0)
    fsdp = exchanged(DataParallelLayout(1, 64), accumulation=2)
    # Ten units, two micro-batches, 63 steps: gathers and reductions have streams of their own.
    assert fsdp.busy(FORWARD, slow) == pytest.approx(2 * 10 * 63, rel=1e-3)
    assert fsdp.busy(BACKWARD, slow) == pytest.approx(2 * 10 * 63, rel=1e-3)
    assert exchanged(DataParallelLayout(64, 1)).busy(BACKWARD, slow) == pytest.approx(
        2 * 10 * 63, rel=1e-3
    )


@pytest.mark.long
def test_every_micro_batch_waits_for_its_first_unit():
    unlimited = {FORWARD: 1e9, BACKWARD: 1e9, TEXT_ENCODER: 1e9}
    once, four_times = (
        exchanged(DataParallelLayout(1, 64), times).exposed(unlimited, FULL_RATES)
        for times in (1, 4)
    )
    assert once > 0 and four_times == pytest.approx(4 * once)


@pytest.mark.long
def test_a_sharded_text_encoder_is_gathered_in_each_micro_batch():
    size = 2 * 3.88e9
    layout = DataParallelLayout(1, 16)
    sharded = {"encoder": int(size / 16), "encoder_sharded": True, "encoder_units": 35}
    found = exchanged(layout, accumulation=8, nodes=2, **sharded)
    [encoder] = [each for each in found.collectives if each.beside == TEXT_ENCODER]
    assert encoder.volume == pytest.approx(8 * size * 15 / 16, rel=1e-6)  # 54 GiB
    computing = {FORWARD: 1e9, BACKWARD: 1e9, TEXT_ENCODER: 1e9}
    assert found.overlaps(computing, guesses())
    assert not found.overlaps({**computing, TEXT_ENCODER: 0.0}, guesses())
    assert not [c for c in exchanged(layout, nodes=2).collectives if c.beside == TEXT_ENCODER]


# Time


def test_an_error_bar_in_closed_form():
    """log seconds = log b - 2 log a: its variance is 4 var(log a) + var(log b)."""
    deviations = dict.fromkeys(NAMES, 0.0) | {"gemm_efficiency": 0.03, "kernel_seconds": 0.05}
    known = Constants(guesses().values, np.diag(list(deviations.values())) ** 2, 0.04, "test")
    found = with_error(lambda c: c["kernel_seconds"] / c["gemm_efficiency"] ** 2, known)
    factor = np.exp(2 * np.sqrt(4 * 0.03**2 + 0.05**2 + 0.04**2))
    assert found.middle == pytest.approx(2e-6 / 0.7**2, rel=1e-9)
    assert found.high == pytest.approx(found.middle * factor, rel=1e-5)
    assert found.low == pytest.approx(found.middle / factor, rel=1e-5)
    # A guess alone is as unsure as its range says.
    alone = replace(guesses(), unexplained=0.0)
    for constant in CONSTANTS:
        found = with_error(lambda c: c[constant.name], alone)
        assert found.high / found.low == pytest.approx(constant.high / constant.low, rel=1e-5)


def step_of(samples: int, products: float = 1.0, attention: float = 1.0) -> StepWork:
    """Work that grows with the samples, but for the number of kernels and the optimizer."""
    return StepWork(
        device=H200,
        micro_batch=Work(
            product_seconds=products * samples * np.array([1e-4, 2e-4]),
            block_share=0.9,
            attention_seconds=attention * samples * np.array([1e-5, 2e-5]),
            moving_seconds=samples * np.array([1e-4, 2e-4]),
            fused_seconds=np.zeros(2),
            kernels=np.array([2000.0, 4000.0]),
        ),
        accumulation=1,
        fp8=False,
        encoder_flops=0.0,
        copied_bytes=0.0,
        optimizer_bytes=2e10,
        communication=Communication(()),
        model_flops=0.0,
    )


def observations(truth, noise: float = 0.0) -> list[Observation]:
    """Steps at sizes where each constant matters somewhere, timed by known constants."""
    generator = np.random.default_rng(0)
    found = []
    for samples in (1, 8, 64, 256):
        # Kinds of work in other shares, as other sizes of the model would have them: in steps that are
        # alike, products and pointwise operations could not be told apart.
        for products, attention in ((1, 1), (10, 1), (1, 100), (0.2, 5)):
            step = step_of(samples, products, attention)
            seconds = step_time(step, truth).seconds * np.exp(noise * generator.normal())
            # Each of another kind of run: what a kind has in common is not told apart.
            words = f"{samples} samples, {products}, {attention}"
            found.append(Observation(words, words, seconds, step))
    return found


def test_calibration_finds_the_constants_that_made_the_times():
    truth = guesses()
    changed = {
        "gemm_efficiency": 0.62,
        "attention_efficiency": 0.55,
        "memory_efficiency": 0.88,
        "kernel_seconds": 3.5e-6,
    }
    truth = type(truth)({**truth.values, **changed}, truth.covariance, 0.0, "truth")
    fitted, residuals = fit(observations(truth), "test")
    for name, value in changed.items():
        # Not exactly: a few per cent are always left open, and the guesses then have a say.
        assert fitted[name] == pytest.approx(value, rel=0.05), name
    assert max(abs(each.relative) for each in residuals) < 0.02
    # What nothing measured stays a guess, as unsure as before.
    free = NAMES.index("network_efficiency")
    assert fitted["network_efficiency"] == pytest.approx(guesses()["network_efficiency"])
    assert fitted.covariance[free, free] == pytest.approx(guesses().covariance[free, free])

    noisy, residuals = fit(observations(truth, noise=0.05), "test")
    assert 0.02 < noisy.unexplained < 0.1
    for name, value in changed.items():
        deviation = np.sqrt(noisy.covariance[NAMES.index(name)][NAMES.index(name)])
        assert abs(np.log(noisy[name] / value)) < 4 * deviation, name


def test_shapes_of_one_run_are_no_runs():
    """Eight shapes of one kind of run tell little more than one of them, and nothing of other kinds."""
    works = [step_of(4096 // frames, frames / 64, frames / 8) for frames in range(8, 65, 8)]
    truth = with_values(gemm_efficiency=0.6)
    shapes = [
        Observation(str(n), "one kind", step_time(work, truth).seconds, work)
        for n, work in enumerate(works)
    ]

    def width(constants: Constants) -> float:
        """Of the error bar of a model with larger products, as a factor."""
        each = works[-1].micro_batch
        other = replace(
            works[-1], micro_batch=replace(each, product_seconds=10 * each.product_seconds)
        )
        seconds = with_error(lambda c: step_time(other, c).seconds, constants)
        return seconds.high / seconds.middle - 1

    one, eight = (fit(some, "test")[0] for some in (shapes[-1:], shapes))
    assert eight.unexplained == one.unexplained == UNEXPLAINED
    narrower = np.diag(one.covariance) <= np.diag(guesses().covariance) * (1 + 1e-9)
    assert narrower.all()
    assert width(eight) > 0.8 * width(one) and width(eight) > 0.12
    apart = [replace(each, kind=each.what) for each in shapes]
    assert width(fit(apart, "test")[0]) < width(eight)


def test_constants_are_kept(tmp_path):
    path = tmp_path / "constants.json"
    save(path, "H100", guesses())
    save(path, "H200", guesses().moved(0, 0.1))
    assert load(path, "H200").values == guesses().moved(0, 0.1).values
    assert load(path, "H100").values == guesses().values
    (tmp_path / "bad.json").write_text('{"H100": {"values": {}}}')
    content = json.loads(path.read_text())
    content["H100"]["values"]["gemm_efficiency"] = float("nan")
    (tmp_path / "nan.json").write_text(json.dumps(content))
    for file, device, words in (
        (path, "A100", "no constants of A100"),
        (tmp_path / "none.json", "H100", "cannot be read"),
        (tmp_path / "bad.json", "H100", "calibrate again"),
        (tmp_path / "nan.json", "H100", "not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            load(file, device)


# Measured runs

RUN = {
    "config": {"data": {"max_frames": 64}, "training": {"global_batch_size": 8}},
    "gpus": 1,
    "gpu": "H100",
    "shapes": [
        {
            "samples": 8,
            "frames": 64,
            "text_tokens": 40,
            "speaker_frames": 64,
            "steps": 5,
            "micro_batches": 10,
            "seconds_per_step": {"median": 0.01},
        },
    ],
}


def test_a_measured_run_is_read(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps([RUN]))
    [run] = read_runs(path)
    [shape] = run.shapes
    assert (run.device.name, run.gpus_per_node, run.peak_memory_gib) == ("H100", 1, None)
    assert (shape.lengths, shape.accumulation, shape.seconds) == (Lengths(64, 40, 64), 2, 0.01)


@pytest.mark.parametrize(
    "content",
    [
        5,
        None,
        {"runs": 5},
        *(
            {**RUN, key: value}
            for key, value in (
                ("gpus", "x"),
                ("gpus", 0),
                ("gpu", 5),
                ("peak_memory_gib", "x"),
                ("config", 5),
                ("gpus_per_node", "x"),
                ("config", {"model": {"flavor": "4B"}}),
            )
        ),
        {**{k: v for k, v in RUN.items() if k != "gpu"}, "environment": "x"},
        *(
            {**RUN, "shapes": [{**RUN["shapes"][0], key: value}]}
            for key, value in (
                ("seconds_per_step", 0),
                ("seconds_per_step", -1),
                ("seconds_per_step", float("nan")),
                ("seconds_per_step", "fast"),
                ("steps", 0),
                ("micro_batches", 2),
                ("samples", 1.5),
            )
        ),
    ],
)
def test_what_no_run_can_have_is_one_sentence(content, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_runs(path)
    assert str(path) in str(caught.value) and "benchmark.json" in str(caught.value)
    assert "\n" not in str(caught.value)
