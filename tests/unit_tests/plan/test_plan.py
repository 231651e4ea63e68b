"""titan-tts plan by hand: rates are those of all GPUs, and every bucket has to fit."""

import re
from dataclasses import astuple, replace

import numpy as np
import pytest
from torchtitan.config.job_config import ActivationCheckpoint

from tests.helpers.plan_cases import DEBUG, H200, SMALL, debug_config
from titan_tts.cli import main
from titan_tts.plan import plan as plan_module
from titan_tts.plan import report
from titan_tts.plan.activations import ActivationMemory
from titan_tts.plan.devices import Cluster
from titan_tts.plan.memory import Activations
from titan_tts.plan.plan import estimated_buckets, make_plan
from titan_tts.plan.plan_command import Options
from titan_tts.plan.planner import Batches, Planner
from titan_tts.plan.report import plan_lines
from titan_tts.plan.step_time import GUESS
from torchtitan.models.dit_tts.model.flops import Lengths, repeated_flops, training_flops
from torchtitan.models.dit_tts.run.benchmark.synthetic import BYTES_PER_SECOND, SyntheticDataset

pytestmark = pytest.mark.usefixtures("remembered_passes")
MIB, GIB = 2**20, 2**30


def frames_of(config, ranks: int) -> np.ndarray:
    """Of the lengths of [benchmark]."""
    data = config.data
    return SyntheticDataset(config.benchmark, data, data.seed, BYTES_PER_SECOND, ranks).frames


@pytest.fixture
def by_hand(monkeypatch):
    """Each sample keeps 100 MiB for its reference and one for each frame."""

    def memory(self, config, sharded, samples, lengths):
        return ActivationMemory(0, samples * (100 + lengths.frames) * MIB, 0)

    monkeypatch.setattr(Activations, "memory", memory)


@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_rates_of_a_step_are_those_of_all_gpus(by_hand, tensor):
    """With tensor parallelism two GPUs have one sample."""
    config = debug_config("--parallelism.data_parallel_replicate_degree=2")
    if tensor > 1:
        config.parallelism.backend = "megatron"
        config.parallelism.tensor_parallel_degree = tensor
    planner = Planner(config, 2 * tensor)
    lengths, cluster = Lengths(64, 40, 64), Cluster(H200, 2 * tensor, 1)
    step = planner.step(planner.config, cluster, GUESS, Batches(lengths, 12, 3))
    seconds = step.seconds
    assert seconds.low < seconds.estimate == sum(step.time.values()) < seconds.high
    flops = 12 * training_flops(planner.sizes.args, lengths)
    for rate, amount in (
        (step.samples_per_second, 2 * 3 * 12),
        (step.mfu, 3 * flops / tensor / H200.peak_flops),
    ):
        expected = [amount / each for each in (seconds.high, seconds.estimate, seconds.low)]
        assert [rate.low, rate.estimate, rate.high] == pytest.approx(expected)
    assert step.flops == 2 * 3 * flops


def test_blocks_that_are_computed_again_take_time_and_count_in_no_rate(by_hand):
    planner = Planner(debug_config(), 1)
    lengths, cluster = Lengths(64, 40, 64), Cluster(H200, 1, 1)
    flops = 12 * training_flops(planner.sizes.args, lengths)
    repeated = 12 * repeated_flops(planner.sizes.args, lengths, {"full": 4})
    assert repeated > 0.2 * flops
    for mode, more in (("none", 0), ("full", repeated)):
        config = replace(planner.config, activation_checkpoint=ActivationCheckpoint(mode=mode))
        step = planner.step(config, cluster, GUESS, Batches(lengths, 12, 3))
        matmuls = GUESS.value * 3 * (flops + more) / H200.peak_flops
        assert step.time["matmuls and attention"] == pytest.approx(matmuls)
        assert step.flops == 3 * flops


def test_every_bucket_has_to_fit(by_hand):
    """Short utterances need more than long ones where their references are long: they decide."""
    arguments = ["--data.bucket_frames=32,64", "--benchmark.mean_seconds=1.0"]
    arguments += ["--compile.enable", "--compile.components=loss"]
    arguments += ["--data.max_reference_ratio=0", "--training.global_batch_size=16"]
    config = debug_config(*arguments)
    states = make_plan(config, Cluster(H200, 1, 1), GUESS).longest.memory.states

    def with_room_for(mib: int):
        needed = states + mib * MIB + 1.5 * GIB
        small = replace(H200, memory_gib=needed / 0.96 / GIB)
        return make_plan(config, Cluster(small, 1, 1), GUESS)

    plan = with_room_for(3310)
    short, long = plan.buckets
    assert (short.batches.micro_batch, long.batches.micro_batch) == (32, 16)
    # 25 x 132 and 20 x 164 MiB; with 12 of the longest there are 24 of the short ones.
    assert (short.largest, long.largest, plan.largest) == (25, 20, 12)
    assert plan.longest.memory.fits and not plan.peak_bucket.memory.fits
    assert plan.peak_bucket.batches.lengths.frames == 32
    assert plan.peak_bucket.memory.total == states + 32 * 132 * MIB
    lines = "\n".join(plan_lines(plan, 1000.0))
    rows = [line.split() for line in lines.splitlines() if line.endswith("DOES NOT FIT")]
    assert rows.pop(0)[0] == "sum"  # of the bucket that needs the most
    shapes = re.findall(r"^ +(\d+) +40 +(\d+) +(\d+) +(\d+) +([\d.]+)%", lines, re.M)
    frames, _, samples, largest, part = zip(*shapes, strict=True)
    assert (frames, samples, largest) == (("32", "64"), ("32", "16"), ("25", "20"))
    assert [row[0] for row in rows] == ["32"] and part[0] == f"{100 * short.fraction:.1f}"
    # What compiles only the loss leaves the blocks eager.
    assert "; eager, activation checkpointing 'none'" in lines
    assert with_room_for(20).largest == 0

    # A mean step is one of the buckets' steps, each as often as it comes.
    fractions = np.array([short.fraction, long.fraction])
    seconds = np.array([short.seconds.estimate, long.seconds.estimate])
    flops = np.array([short.flops, long.flops], float)
    mean = fractions @ seconds
    assert plan.mean_seconds.estimate == pytest.approx(mean)
    assert plan.mean_mfu.estimate == pytest.approx(fractions @ flops / mean / H200.peak_flops)
    assert seconds[0] != pytest.approx(seconds[1], rel=1e-3) and fractions[0] < 0.4


@pytest.mark.long
def test_the_whole_run_in_hours_of_audio_and_of_gpus(by_hand):
    arguments = ["--data.bucket_frames=32,64", "--benchmark.mean_seconds=1.0"]
    arguments += ["--training.steps=7200", "--lr_scheduler.warmup_steps=720"]
    arguments.append("--training.global_batch_size=16")
    config = debug_config(*arguments)
    plan = make_plan(config, Cluster(H200, 2, 1), GUESS, price=2.5)
    # The mean over the buckets' steps is of one GPU, too.
    flops = sum(each.fraction * each.flops for each in plan.buckets)
    assert plan.mean_mfu.estimate == pytest.approx(
        flops / 2 / plan.mean_seconds.estimate / H200.peak_flops
    )
    frames = frames_of(config, 2)
    steps = (frames <= 32).sum() / 32 + (frames > 32).sum() / 16
    assert plan.hours_per_step == pytest.approx(frames.sum() / 25 / 3600 / steps)
    intervals = map(astuple, (plan.gpu_hours, plan.cost, plan.mean_seconds))
    for hours, cost, seconds in zip(*intervals, strict=True):
        assert hours == pytest.approx(7200 * seconds * 2 / 3600)
        assert cost == pytest.approx(2.5 * hours)
    lines = "\n".join(plan_lines(plan, 4.0))
    for words in (
        f"720 steps, {720 * plan.hours_per_step:,.0f} hours of audio",
        f"{7200 * plan.hours_per_step:,.0f} hours of audio: {1800 * plan.hours_per_step:,.1f} passes over 4 hours",
        f"{plan.gpu_hours.estimate / 2:,.1f} hours on 2",
        "GPUs: 1 x 2 H200 (H200 SXM: 141 GB, NVLink 900 GB/s): 989 dense bf16 TFLOP/s, 139 GiB, ",
        "4800 GB/s; links 450 GB/s in a node, 100 GB/s between nodes\n",
        f"GPU hours       {plan.gpu_hours.estimate:,.1f} (",  # a small run takes one or two
        f"cost            {plan.cost.estimate:,.2f} (",
        "ranges: the time divided and multiplied by 1.25",
    ):
        assert words in lines, lines
    assert "cost " not in "\n".join(plan_lines(replace(plan, cost=None), 4.0))
    # 720 steps of a quarter and 720 of a half.
    ramp = ["--training.batch_ramp=4,2", "--training.batch_ramp_steps=720"]
    found = make_plan(debug_config(*arguments, *ramp), Cluster(H200, 2, 1), GUESS)
    assert found.global_batches == 7200 - 720 * (3 / 4 + 1 / 2) and found.warmup_batches == 180
    assert found.gpu_hours.estimate == pytest.approx(
        plan.gpu_hours.estimate * found.global_batches / 7200
    )


def test_buckets_have_as_many_steps_as_their_samples_fill():
    sizes = ["--training.local_batch_size=16", "--training.global_batch_size=16"]
    lengths = ["--data.bucket_frames=32,64", "--benchmark.mean_seconds=1.0"]
    config = debug_config(*lengths, *sizes)
    frames = frames_of(config, 1)
    samples = (frames <= 32).sum() / (frames > 32).sum()
    for given, expected in (([], 32), ([48, 16], 48)):
        config.data.bucket_batch_sizes = given
        (more, short), (fewer, long) = estimated_buckets(config, 1)
        assert (short.micro_batch, long.micro_batch) == (expected, 16)
        assert more + fewer == pytest.approx(1)
        assert more / fewer == pytest.approx(samples * 16 / expected)


def test_packed_rows_are_samples_of_the_mean_length():
    """As many frames as buckets of the longest have, and hardly any padding among them."""
    config = debug_config("--training.global_batch_size=48", "--data.longest_per_row=12")
    config.data.batching = "packed"
    [(fraction, batches)] = estimated_buckets(config, 2)
    assert fraction == 1 and batches.accumulation == 1
    lengths, frames = batches.lengths, frames_of(config, 2)
    assert batches.micro_batch * lengths.frames == pytest.approx(
        24 * config.data.max_frames, rel=0.02
    )
    assert 0.99 < lengths.frames / frames.mean() < 1.04


def test_defaults():
    options = Options()
    assert (options.gpu, options.gpus, options.gpus_per_node) == ("H200", 0, 0)
    assert (options.suggest, options.out) == (False, None)
    assert (options.inter_node_gbps, options.price, options.data_hours) == (0, 0, 1000)


def test_what_the_command_passes_on(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(plan_module, "make_plan", lambda *each: given.extend(each))
    monkeypatch.setattr(report, "plan_lines", lambda plan, hours: [f"{hours} hours", "end"])
    options = (
        "--gpu H100 --gpus-per-node 2 --gpus 6 --inter-node-gbps 25 --price 2.5 --data-hours 7"
    )
    keys = ["--metrics.peak_tflops=500", "--training.global_batch_size=24", *SMALL]
    keys.append("--data.batch_multiple=6")
    assert main(["plan", "debug", *options.split(), *keys]) == 0
    assert capsys.readouterr().out == "7.0 hours\nend\n"
    config, cluster, factor, price = given
    assert config.training.global_batch_size == 24 and price == 2.5
    assert (factor.value, cluster.device.name, cluster.device.peak_flops) == (1.6, "H100", 500e12)
    assert (cluster.gpus_per_node, cluster.nodes, cluster.inter_node_gbps) == (2, 3, 25)
    keys = ["--training.global_batch_size=48", "--data.batch_multiple=48", *SMALL]
    for words, nodes in (("GH200 --gpus 16", 4), ("H100 --gpus 4", 1), ("GH200", 1)):
        assert main(["plan", "debug", "--gpu", *words.split(), *keys]) == 0
        assert (given[-3].gpus_per_node, given[-3].nodes) == (4, nodes)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "needs a config"),
        (["no.toml"], "give the path of a TOML file"),
        ([str(DEBUG), "--gpu", "H300"], "allowed are A100"),
        ([str(DEBUG), "--gpus", "-1"], "--gpus = -1, but it must be from 0"),
        ([str(DEBUG), "--gpus", "12"], "--gpus 12 must be whole nodes of 8 H200"),
        ([str(DEBUG), "--out", "x.toml"], "--out x.toml needs --suggest"),
        ([str(DEBUG), "--suggest", "--out", "/proc/x.toml"], "/proc/x.toml cannot be written"),
        ([str(DEBUG), "--gpus-per-node", "1"], "mixed_precision_param = 'float32'"),
        ([str(DEBUG), "--gpus-per-node", "1", *SMALL, "--attention.backend=flex"], "'flex' needs"),
        (["debug", "--price", "-1"], "--price = -1.0, but it must be from 0"),
        (["debug", "--data-hours", "0"], "--data-hours = 0.0, but it must be from 0.001"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words, capsys):
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""
