"""Steps, runs and layouts: against the one measurement, and by hand."""

from dataclasses import replace
from itertools import product

import pytest

from tests.helpers.plan_cases import H200, debug_config, step_of
from titan_tts.cli import main
from titan_tts.plan.devices import Cluster, find_device
from titan_tts.plan.forecast import Planner, compare_layouts
from titan_tts.plan.step import WAITS, Batches, Layout, Transfer, exposed_seconds
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.model.flops import Lengths, repeated_flops, training_flops

LENGTHS = Lengths(64, 40, 64)
ONE = Cluster(H200, 1, 1)
EAGER = ["--compile.no-enable", "--activation_checkpoint.mode=none"]
SHAPE = ["--training.local_batch_size=32", "--training.global_batch_size=32", "--ema.no-enable"]
SHAPE += ["--data.batch_multiple=32"]


def shipped(name: str, *arguments: str):
    return load_config([f"--job.config_file={find_config(name)}", *arguments])


@pytest.mark.parametrize(
    "arguments, seconds, gib", [([], 0.2972, 37.49), (EAGER, 0.4667, 65.39)], ids=["step", "eager"]
)
def test_the_measured_steps(arguments, seconds, gib):
    """benchmarks/results/gpu_check_nvidia_h200.json; the eager step gave no constant of time."""
    planner = Planner(shipped("800m", *SHAPE, *arguments), ONE)
    step = planner.step(planner.longest())
    assert step.seconds == pytest.approx(seconds, rel=0.03)
    assert step.bytes / 2**30 == pytest.approx(gib, rel=0.01)
    assert step.fits and step.samples == 32


def debug_planner(*arguments: str, cluster: Cluster = ONE, **sections) -> Planner:
    return Planner(debug_config(*arguments, **sections), cluster)


@pytest.mark.parametrize("tensor", [1, 2])
def test_rates_are_those_of_all_gpus(tensor):
    """With tensor parallelism two GPUs have one sample."""
    degrees = {"data_parallel_replicate_degree": 2, "tensor_parallel_degree": tensor}
    degrees["backend"] = "megatron" if tensor > 1 else "torchtitan"
    planner = debug_planner(cluster=Cluster(H200, 2 * tensor, 1), parallelism=degrees)
    step = planner.step(Batches(LENGTHS, 12, 3))
    flops = 2 * 3 * 12 * training_flops(planner.model.args, LENGTHS)
    assert step.samples == 2 * 3 * 12 and step.flops == flops
    assert step.mfu(2.0) == pytest.approx(flops / (2 * tensor) / 989e12 / 2)
    assert step.seconds == pytest.approx(sum(step.time.values()))
    assert step.time[WAITS] == pytest.approx(3 * 0.0216)


def test_what_is_computed_again_takes_time_and_counts_in_no_rate():
    planner = debug_planner()
    flops = training_flops(planner.model.args, LENGTHS)
    repeated = repeated_flops(planner.model.args, LENGTHS, {"full": 4})
    assert repeated > 0.2 * flops
    unit = 2 * 64 * (9 * 192 + 3 * 528)
    for mode, more, passes in (("none", 0, 4), ("full", repeated, 4 * 4 / 3)):
        step = debug_planner(f"--activation_checkpoint.mode={mode}").step(Batches(LENGTHS, 12, 3))
        time = step.time["matmuls and attention"]
        assert time == pytest.approx(36 * (flops + more) / 0.69 / 989e12)
        moved = 36 * 48.4 * passes * unit
        assert step.time["pointwise kernels"] == pytest.approx(moved / 4.8e12)
        assert step.flops == 36 * flops


@pytest.mark.parametrize("tensor", [1, 2])
def test_fp8_speeds_up_products_only_and_another_gpu_is_scaled_by_its_peak_and_bandwidth(tensor):
    def step(*given, gpu="H200"):
        degrees = {"tensor_parallel_degree": tensor, "backend": "megatron"}
        cluster = Cluster(find_device(gpu), tensor, 1)
        planner = debug_planner(*given, cluster=cluster, parallelism=degrees)
        return planner.step(Batches(LENGTHS, 12, 1))

    plain, fp8, other = step(), step("--model.converters=float8"), step(gpu="A100")
    # 64 frames, 40 tokens and 16 patches are the keys of 4 blocks.
    attention = 12 * 12 * 4 * 64 * (64 + 40 + 16) * 192 / tensor / 0.69 / 989e12
    products = plain.time["matmuls and attention"] - attention
    assert fp8.time["matmuls and attention"] == pytest.approx(attention + products / 1.7)
    ratios = [other.time[name] / plain.time[name] for name in list(plain.time)[:4]]
    assert ratios == pytest.approx([989 / 312, 4800 / 2039, 1, 4800 / 2039])
    given = step("--metrics.peak_tflops=500")
    assert given.mfu(2.0) == pytest.approx(plain.mfu(2.0) * 989 / 500)


def test_the_optimizer_moves_its_states():
    planner = debug_planner(ema={"decays": [0.9, 0.99]})
    numbers = planner.model.trained
    each = 4 * 6 + 4 * 4 + 2 * (4 + 8)
    found = step_of(planner.config, planner.model, Layout(1, 1)).time["optimizer"]
    assert found == pytest.approx(each * numbers / (0.76 * 4.8e12))
    small = debug_planner("--optimizer.state_dtype=8bit", ema={"enable": False})
    found = step_of(small.config, small.model, Layout(1, 1)).time["optimizer"]
    assert found == pytest.approx((4 * 6 + 4) * numbers / (0.76 * 4.8e12))


def transfers(
    replicas: int, shards: int, tensor: int = 1, times: int = 3, given: tuple = (), **keys
):
    gpus = replicas * shards * tensor
    degrees = {"data_parallel_replicate_degree": replicas, "data_parallel_shard_degree": shards}
    degrees |= {"tensor_parallel_degree": tensor, **keys}
    degrees |= {"backend": "megatron"} if tensor > 1 else {}
    batch = ["--training.global_batch_size=16", "--data.batch_multiple=16"]
    cluster = Cluster(H200, min(4, gpus), max(1, gpus // 4), 25.0)
    planner = debug_planner(*batch, *given, parallelism=degrees, cluster=cluster)
    step = planner.step(Batches(LENGTHS, 12, times))
    return {each.name: each for each in step.transfers}, step


def test_volumes_of_layouts():
    found, step = transfers(1, 16)
    n = step.model.trained
    shares = 15 / 16
    assert found["all-gather, forward"].volume == pytest.approx(3 * 2 * n * shares)
    assert found["reduce-scatter"].volume == pytest.approx(3 * 4 * n * shares)
    again = found["all-gather, backward"].volume / (3 * 2 * shares)
    stays = sum(
        size
        for name, size in step.model.parts().items()
        if not name.endswith(("encoder", "layers"))
    )
    assert again == pytest.approx(n - stays - 2_648_064 / 4)
    # Between nodes the one group of a node has its 25 GB/s to itself.
    moved = found["reduce-scatter"]
    assert moved.seconds == pytest.approx(moved.volume / 25e9 / 0.75)
    assert step.first_fraction == pytest.approx(2_648_064 / 4 / n)
    kept, _ = transfers(1, 16, fsdp_reshard_after_forward="never")
    assert kept["all-gather, forward"].volume == pytest.approx(2 * n * shares)
    assert "all-gather, backward" not in kept
    assert kept["reduce-scatter"].volume == pytest.approx(4 * n * shares)
    # Shards within a node use its links; the four groups of replicas share the node's network.
    hybrid, _ = transfers(4, 4)
    inside, between = hybrid["reduce-scatter"], hybrid["all-reduce"]
    assert inside.volume == pytest.approx(3 * 4 * n * 3 / 4)
    assert inside.seconds == pytest.approx(inside.volume / 450e9 / 0.75)
    assert between.volume == pytest.approx(2 * 4 * n / 4 * 3 / 4)
    assert between.seconds == pytest.approx(4 * between.volume / 25e9 / 0.75)
    ddp, _ = transfers(4, 1)
    assert list(ddp) == ["all-reduce"]
    assert ddp["all-reduce"].volume == pytest.approx(2 * 4 * n * 3 / 4)


def test_tensor_parallelism_sums_activations():
    """Twice in the forward pass of each of 4 blocks, which nothing hides, and twice in the backward pass, beside products."""
    found, _ = transfers(2, 1, 2)
    each, beside = found["tensor parallelism"], found["beside products of tensor parallelism"]
    assert each.volume == beside.volume == pytest.approx(3 * 8 * 2 * (2 * 12 * 64 * 192) / 2)
    assert each.seconds == beside.seconds == pytest.approx(each.volume / 450e9 / 0.75)
    hidden = found["all-reduce"].seconds + beside.seconds
    for computing, fraction in ((1e9, 0.25), (0.0, 1)):
        exposed = exposed_seconds(list(found.values()), 0.25, computing, 3)
        assert exposed == pytest.approx(each.seconds + fraction * hidden)
    # Each of the 8 sums in the backward pass is also a gather there.
    divided, _ = transfers(2, 1, 2, given=("--megatron.sequence_parallel",))
    assert divided["tensor parallelism"].volume == pytest.approx(1.5 * each.volume)


def test_three_passes_of_a_teacher_are_as_much_as_a_forward_and_a_backward_pass():
    planner, steps = debug_planner("--activation_checkpoint.mode=none"), []
    for passes, tensor in product((0, 3), (1, 2)):
        args = replace(planner.model.args, teacher_passes=passes)
        model = replace(planner.model, args=args)
        steps.append(step_of(planner.config, model, Layout(1, 2, tensor)))
    (one, two), (taught, taught_two) = steps[:2], steps[2:]
    # Of the products that are divided: conditions are encoded once.
    a, b, c, d = (each.time["matmuls and attention"] for each in steps)
    assert c - d == pytest.approx(2 * (a - b))
    name = "pointwise kernels"
    assert taught.time[name] == pytest.approx(2 * one.time[name])
    plain, moved = ({t.name: t.volume for t in step.transfers} for step in (two, taught_two))
    assert moved["all-gather, teacher"] == pytest.approx(3 * plain["all-gather, backward"])
    assert moved["tensor parallelism"] == pytest.approx(4 * plain["tensor parallelism"])
    memory = taught.memory
    assert memory["teacher"] == memory["weights"] + memory["gathered weights"]


@pytest.mark.parametrize(
    "micro_batches, moved, exposed",
    [
        (4, {"each": 6.0}, 0),  # 1.5 s in each of four times 2 s
        (4, {"each": 10.0}, 2),
        (4, {"each": 6.0, "first": 1.5}, 1),  # of which 0.5 s are left
        (4, {"each": 6.0, "first": 1.5, "last": 2.5}, 1 + 2),
        (4, {"each": 10.0, "last": 2.5}, 2 + 2.5),
        (1, {"each": 8.0}, 0),
    ],
)
def test_a_transfer_is_hidden_by_the_micro_batches_in_which_it_is(micro_batches, moved, exposed):
    transfers = [Transfer("", 0, seconds, when) for when, seconds in moved.items()]
    assert exposed_seconds(transfers, 0.0, 8.0, micro_batches) == pytest.approx(exposed)


def test_every_bucket_has_to_fit():
    short, captions = "--benchmark.mean_seconds=1.0", "--data.max_caption_tokens=12"
    longest = debug_planner("--data.bucket_frames=32,48", captions).longest().lengths
    assert (longest.frames, longest.caption_tokens) == (48, 12)
    for batching in ("buckets", "packed"):
        shapes = debug_planner(short, captions, f"--data.batching={batching}").buckets()
        assert {each.lengths.caption_tokens for _, each in shapes} == {12}
    arguments = ["--data.bucket_frames=32,64", short]
    arguments += ["--data.max_reference_ratio=0", "--training.global_batch_size=16"]
    small = Cluster(replace(H200, memory_gib=3.0), 1, 1)
    planner = debug_planner(*arguments, cluster=small)
    (few, short), (many, long) = planner.buckets()
    assert few + many == pytest.approx(1) and (short.micro_batch, long.micro_batch) == (32, 16)
    steps = [planner.step(short), planner.step(long)]
    assert planner.peak.bytes == max(each.bytes for each in steps)
    mean = few * steps[0].seconds + many * steps[1].seconds
    assert planner.seconds == pytest.approx(mean)
    flops = few * steps[0].flops + many * steps[1].flops
    assert planner.mfu == pytest.approx(flops / mean / 989e12)
    # All of it fits up to `largest`, where the shorter bucket has twice the samples.
    both = [(replace(long, micro_batch=planner.largest_of_all + n), replace(short, micro_batch=2 * (planner.largest_of_all + n))) for n in (0, 1)]  # fmt: skip
    assert [all(planner.step(each).fits for each in pair) for pair in both] == [True, False]


def test_offloaded_states_are_not_the_gpus():
    cluster = Cluster(H200, 2, 1)
    planner = debug_planner("--training.enable_cpu_offload", cluster=cluster)
    step = planner.step(Batches(LENGTHS, 6, 1))
    assert not step.memory.keys() & {"weights", "gradients", "optimizer", "EMA"}
    # Weights, gradients, two moments and EMA of one half of the numbers, padded by a little.
    assert step.offloaded == pytest.approx(5 * 4 * planner.model.trained / 2, rel=1e-3)


def test_layouts_are_compared_by_time_and_training_accepts_the_best():
    given = ["--training.global_batch_size=16", "--training.local_batch_size=0"]
    config = debug_config(*given, "--data.batch_multiple=16")
    planner = Planner(config, Cluster(H200, 4, 2))
    choices = compare_layouts(planner, config)
    seconds = [step.seconds for step, _ in choices]
    names = {step.layout for step, _ in choices}
    assert seconds == sorted(seconds) and len(names) == len(choices)
    assert {Layout(8, 1), Layout(1, 8), Layout(2, 4), Layout(4, 2), Layout(2, 2, 2)} <= names
    for step, settings in choices:
        changed = {n: replace(getattr(config, n), **keys) for n, keys in settings.items()}
        validate_config(replace(config, **changed), 8, list(model_flavors()))
        assert step.fits and step.samples == 16
    tight = replace(H200, memory_gib=0.01)
    assert compare_layouts(Planner(config, Cluster(tight, 4, 2)), config) == []
    assert tight.capacity < 0


def test_the_command_answers_for_many_gpus(capsys):
    given = "plan 8b_megatron --gpu GH200 --gpus 64 --gpus-per-node 4 --inter-node-gbps 25"
    assert main(given.split()) == 0
    printed = capsys.readouterr().out
    for words in (
        "8,238,706,816",
        "GPUs: 64 (16 x 4 GH200)",
        "TP 2 x FSDP2, replicas x shards = 1 x 32",
        "32 ranks x 16 samples x 2 accumulation steps = 1,024 samples, 8.74 hours of audio",
        "25 GB/s between nodes",
        "scaled to the GH200",
    ):
        assert words in printed, printed
    [best] = [line for line in printed.splitlines() if line.endswith("  best")]
    degree = best.split(" x ")[1].split()[0]
    assert f"data_parallel_shard_degree = {degree}" in printed


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("plan", "needs a config"),
        ("plan debug --gpus 1", "mixed_precision_param = 'float32'"),
        ("plan debug --gpu B100", "--gpu 'B100'"),
        ("plan debug --gpus 12", "whole nodes of 8"),
        ("plan debug --gpus=-1", "--gpus"),
        ("plan debug --inter-node-gbps=-1", "--inter-node-gbps"),
        ("train debug --dry-run --nproc 0", "--nproc"),
    ],
)
def test_what_has_no_plan(arguments, words, capsys):
    assert main(arguments.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, gpus",
    [
        ("--nproc 4 --nodes 2", "8 (1 x 8 H200)"),
        ("--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=3", "6 (1 x 6 H200)"),
        ("", "1 (1 x 1 H200)"),
    ],
)  # fmt: skip
def test_a_dry_run_starts_and_writes_nothing(more, gpus, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = f"train debug --dry-run --data.path=nowhere --training.global_batch_size=24 --data.batch_multiple=24 --training.local_batch_size=0 {more}"
    assert main(given.split()) == 0
    printed = capsys.readouterr().out
    assert f"GPUs: {gpus}" in printed and "3,855,872" in printed and list(tmp_path.iterdir()) == []
    assert "= 24 samples" in printed and "no time: only bfloat16 was measured" in printed
