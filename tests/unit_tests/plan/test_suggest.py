"""titan-tts plan --suggest: which layouts it compares, in which order, and what it says and writes of them."""

import tomllib
from dataclasses import replace

import pytest

from tests.helpers.plan_cases import H200, SMALL, debug_config
from titan_tts.cli import main
from titan_tts.plan import suggest as suggest_module
from titan_tts.plan.activations import ActivationMemory
from titan_tts.plan.devices import Cluster
from titan_tts.plan.memory import Activations
from titan_tts.plan.plan import make_plan
from titan_tts.plan.step_time import GUESS
from titan_tts.plan.suggest import layouts, suggest
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError

MIB, GIB = 2**20, 2**30
BATCH = ["--training.global_batch_size=64", "--data.batch_multiple=64", "--compile.enable"]


@pytest.fixture
def by_hand(monkeypatch):
    """A sample keeps 100 MiB, 80 under a budget, and 10 with full checkpointing."""

    def memory(self, config, sharded, samples, lengths):
        sizes = {"none": 100, "memory_budget": 80, "full": 10}
        size = samples * sizes[config.activation_checkpoint.mode]
        return ActivationMemory(0, size * MIB // config.parallelism.tensor_parallel_degree, 0)

    monkeypatch.setattr(Activations, "memory", memory)


def cluster(allocations: float = 100 * GIB, **options) -> Cluster:
    """Two nodes of four GPUs whose allocations may come to so many bytes."""
    gib = (allocations + 1.5 * GIB + 1) / 0.96 / GIB
    return Cluster(replace(H200, memory_gib=gib), 4, 2, **options)


def test_layouts_of_the_four_heads_on_two_nodes():
    """Six heads' worth of GPUs a node cannot be divided by four, and nine of eighteen ranks are no nodes."""
    names = [layout.name for layout in layouts(debug_config(), Cluster(H200, 4, 2))]
    alone = [name for name in names if "," not in name]
    assert [name for name in alone if not name.startswith("TP")] == [
        *("DDP 8 x 1", "HSDP 4 x 2", "HSDP 2 x 4", "FSDP2 1 x 8")
    ]
    assert [name for name in alone if name.startswith("TP")] == [
        *("TP 2 x DDP 4 x 1", "TP 2 x HSDP 2 x 2", "TP 2 x FSDP2 1 x 4"),
        *("TP 4 x DDP 2 x 1", "TP 4 x FSDP2 1 x 2"),
    ]
    # Twice as many where weights may stay gathered, and again where frames may be divided.
    assert len(names) == len(set(names)) == 1 + 3 * 2 + (2 + 2 * 4) + (2 + 4)
    assert "TP 2 x HSDP 2 x 2, kept gathered, SP" in names
    uneven = [layout.degrees for layout in layouts(debug_config(), Cluster(H200, 6, 3))]
    assert {each.shards for each in uneven if each.tensor == 1} == {1, 2, 3, 6, 18}
    assert {each.tensor for each in uneven} == {1, 2}


@pytest.mark.long
def test_over_slow_links_between_nodes_the_fewest_bytes_win(by_hand):
    """Of P parameters a node sends 4 bytes each by HSDP, an all-reduce of its four quarters; by FSDP2 7/8 of
    two and four; by DDP twice 7/8 of four. Nothing hides them."""
    slow, rate = cluster(inter_node_gbps=0.05), 0.75 * 0.05e9
    found = suggest(debug_config(*BATCH), slow, GUESS)
    config = found.best.config
    parameters = sum(part.parameters for part in make_plan(config, slow, GUESS).summary.parts)
    assert found.best.layout.name == "HSDP 2 x 4"
    exposed = found.best.time["exposed communication"]
    assert exposed == pytest.approx(4 * parameters / rate, rel=0.01)
    # The other is faster by what its backward pass does not gather, inside a node.
    assert [each.layout.name for each in found.fitting] == [
        *("HSDP 2 x 4, kept gathered", "HSDP 2 x 4")
    ]
    assert found.others["HSDP 2 x 4, kept gathered"] == "no more than 1 % faster"
    sent = {"FSDP2 1 x 8, kept gathered": 5.25, "HSDP 4 x 2": 6, "DDP 8 x 1": 7}
    for name, size in sent.items():
        why, _, more = found.others[name].partition("+")
        assert why == "at most 0.0%: exposed communication " and more.endswith(" ms"), name
        lost = 1e3 * (size - 4) * parameters / rate
        assert float(more[:-3].replace(",", "")) == pytest.approx(lost, rel=0.01), name
    assert found.best.layout.name not in found.others and len(found.others) == 22


@pytest.mark.long
def test_what_does_not_fit_is_left_with_its_least_memory(by_hand):
    """Eight samples a rank: 800 MiB, 640 under a budget, 80 recomputed; states take a few more."""
    config = debug_config(*BATCH, "--data.bucket_frames=64")
    for allocations, expected in ((1200, "none"), (720, "memory_budget"), (150, "full")):
        found = suggest(config, cluster(allocations * MIB), GUESS)
        assert found.best.layout.name == "HSDP 2 x 4"
        options = found.best.config.activation_checkpoint
        assert (options.mode, found.best.batches.micro_batch) == (expected, 8)
        assert (
            found.best.memory.fits
            and found.best.memory.activations.saved
            == 8
            * MIB
            * {
                "none": 100,
                "memory_budget": 80,
                "full": 10,
            }[expected]
        )
    with pytest.raises(InputError) as refusal:
        suggest(config, cluster(20 * MIB), GUESS)
    words = str(refusal.value)
    assert "no layout of " in words and "fits 8 GPUs: " in words
    # The complete weights, gradients, moments and average of DDP, 20 bytes each, and its copy.
    weights = 24 * 4.0 / 2**10
    assert f"DDP 8 x 1: does not fit: {weights:.1f} of 0.0 GiB" in words


def test_a_batch_that_ranks_cannot_divide_and_one_that_buckets_cannot(by_hand):
    config = debug_config("--training.global_batch_size=4", "--data.batch_multiple=4")
    found = suggest(config, cluster(), GUESS)
    assert found.others["FSDP2 1 x 8"] == "4 samples for 8 data-parallel ranks"
    assert found.best.layout.degrees.tensor > 1
    config = debug_config("--training.global_batch_size=64", "--data.batch_multiple=16")
    found = suggest(config, cluster(), GUESS)
    # Sixteen cannot be divided among eight ranks x four micro-batches: those are no choices.
    assert all(each.batches.accumulation <= 8 for each in found.fitting)
    with pytest.raises(InputError, match="global_batch_size = -1, but --suggest divides it"):
        suggest(debug_config("--training.global_batch_size=-1"), cluster(), GUESS)


def test_a_layout_loses_by_its_largest_part(by_hand):
    config = debug_config("--training.global_batch_size=8", "--data.batch_multiple=8")
    best = suggest(config, cluster(), GUESS).best
    slower = dict.fromkeys(best.time, 0.0) | {"matmuls and attention": 0.5, "optimizer": 0.25}
    best = replace(best, time=dict.fromkeys(best.time, 0.0))
    full = replace(best.config.activation_checkpoint, mode="full")
    for options, words in ((full, "recomputation"), (best.config.activation_checkpoint, "matmuls")):
        other = replace(
            best, time=slower, config=replace(best.config, activation_checkpoint=options)
        )
        assert suggest_module._loses(other, best).startswith(words)
        assert suggest_module._loses(other, best).endswith(" +500.0 ms")


@pytest.mark.slow
@pytest.mark.usefixtures("remembered_passes")
def test_the_file_is_the_config_with_the_best_layout(tmp_path, capsys, monkeypatch):
    out = tmp_path / "fast.toml"
    plan = ["plan", "debug", "--gpus", "8", "--gpus-per-node", "4", *SMALL, *BATCH]
    assert main([*plan, "--suggest", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert (
        "2 x 4 H200, 64 samples a step" in printed and "why others lose to HSDP 2 x 4:" in printed
    )
    sections = tomllib.loads(out.read_text())
    assert sections["data"]["path"] == "outputs/data/spoken_digits/train"
    assert sections["parallelism"] == {
        **{"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4}
    }
    assert sections["training"]["max_local_batch_size"] == 8
    assert (
        "config_file" not in sections["job"] and "ema" in sections and "benchmark" not in sections
    )
    assert out.read_text().startswith("# By titan-tts plan --suggest of ")
    config = load_config(["--job.config_file", str(out)])
    found = make_plan(config, Cluster(H200, 4, 2), GUESS)
    row = next(line for line in printed.splitlines() if line.startswith("HSDP 2 x 4  "))
    assert f"{found.longest.mfu.estimate:.1%} (" in row
    assert row.split()[-1] == f"{found.peak_bucket.memory.total / GIB:.1f}"
    capsys.readouterr()
    assert main([*plan, "--suggest", "--out", str(out)]) == 2
    assert f"--out {out} exists; give another file" in capsys.readouterr().err
