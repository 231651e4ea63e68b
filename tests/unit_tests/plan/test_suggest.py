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
KEPT = {"none": 100, "memory_budget": 80, "full": 10}


@pytest.fixture
def by_hand(monkeypatch):
    """A sample keeps KEPT MiB."""

    def memory(self, config, sharded, samples, lengths):
        size = samples * KEPT[config.activation_checkpoint.mode] * MIB
        return ActivationMemory(0, size // config.parallelism.tensor_parallel_degree, 0)

    monkeypatch.setattr(Activations, "memory", memory)


def found(config, mib: float = 100 * 1024, **options):
    """On two nodes of four GPUs whose allocations may come to so many MiB."""
    gib = (mib * MIB + 1.5 * GIB + 1) / 0.96 / GIB
    return suggest(config, Cluster(replace(H200, memory_gib=gib), 4, 2, **options), GUESS)


def test_layouts_of_the_four_heads_on_two_nodes():
    """Six heads' worth of GPUs a node cannot be divided by four, and nine of eighteen ranks are no nodes."""
    names = [layout.name for layout in layouts(debug_config(), Cluster(H200, 4, 2))]
    assert [name for name in names if "," not in name] == [
        *("DDP 8 x 1", "HSDP 4 x 2", "HSDP 2 x 4", "FSDP2 1 x 8"),
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
    suggestion = found(debug_config(*BATCH), inter_node_gbps=0.05)
    best, others = suggestion.best, suggestion.others
    parts = make_plan(best.config, Cluster(H200, 4, 2), GUESS).summary.parts
    seconds = sum(part.parameters for part in parts) / 0.75 / 0.05e9
    assert best.layout.name == "HSDP 2 x 4" not in others and len(others) == 22
    assert best.time["exposed communication"] == pytest.approx(4 * seconds, rel=0.01)
    # The other is faster by what its backward pass does not gather, inside a node.
    names = [each.layout.name for each in suggestion.fitting]
    assert names == ["HSDP 2 x 4, kept gathered", "HSDP 2 x 4"]
    assert others["HSDP 2 x 4, kept gathered"] == "no more than 1 % faster"
    for name, size in {"FSDP2 1 x 8, kept gathered": 5.25, "HSDP 4 x 2": 6, "DDP 8 x 1": 7}.items():
        why, _, more = others[name].partition("+")
        assert why == "at most 0.0%: exposed communication " and more.endswith(" ms"), name
        lost = float(more[:-3].replace(",", "")) / 1e3
        assert lost == pytest.approx((size - 4) * seconds, rel=0.01), name


@pytest.mark.long
def test_what_does_not_fit_is_left_with_its_least_memory(by_hand):
    """Eight samples a rank: 800 MiB, 640 under a budget, 80 recomputed; states take a few more."""
    config = debug_config(*BATCH, "--data.bucket_frames=64")
    for room, mode in ((1200, "none"), (720, "memory_budget"), (150, "full")):
        best = found(config, room).best
        assert (best.layout.name, best.batches.micro_batch) == ("HSDP 2 x 4", 8)
        assert best.config.activation_checkpoint.mode == mode and best.memory.fits
        assert best.memory.activations.saved == 8 * MIB * KEPT[mode]
    # The complete weights, gradients, moments and average of DDP, 20 bytes each, and its copy: 0.09 GiB.
    words = "no layout of .* fits 8 GPUs: .*DDP 8 x 1: does not fit: 0.1 of 0.0 GiB"
    with pytest.raises(InputError, match=words):
        found(config, 20)


def test_a_batch_that_ranks_cannot_divide_and_one_that_buckets_cannot(by_hand):
    config = debug_config("--training.global_batch_size=4", "--data.batch_multiple=4")
    few = found(config)
    assert few.others["FSDP2 1 x 8"] == "4 samples for 8 data-parallel ranks"
    assert few.best.layout.degrees.tensor > 1
    config = debug_config("--training.global_batch_size=64", "--data.batch_multiple=16")
    # Sixteen cannot be divided among eight ranks x four micro-batches: those are no choices.
    assert all(each.batches.accumulation <= 8 for each in found(config).fitting)
    with pytest.raises(InputError, match="global_batch_size = -1, but --suggest divides it"):
        found(debug_config("--training.global_batch_size=-1"))


def test_a_layout_loses_by_its_largest_part(by_hand):
    config = debug_config("--training.global_batch_size=8", "--data.batch_multiple=8")
    best = found(config).best
    best = replace(best, time=dict.fromkeys(best.time, 0.0))
    slower = replace(best, time=best.time | {"matmuls and attention": 0.5, "optimizer": 0.25})
    for mode, part in (("full", "recomputation"), ("none", "matmuls and attention")):
        slower.config.activation_checkpoint.mode = mode
        assert suggest_module._loses(slower, best) == f"{part} +500.0 ms"


@pytest.mark.slow
@pytest.mark.usefixtures("remembered_passes")
def test_the_file_is_the_config_with_the_best_layout(tmp_path, capsys):
    out = tmp_path / "fast.toml"
    plan = ["plan", "debug", "--gpus", "8", "--gpus-per-node", "4", *SMALL, *BATCH]
    plan += ["--suggest", "--out", str(out)]
    assert main(plan) == 0
    printed = capsys.readouterr().out
    for words in ("2 x 4 H200, 64 samples a step", "why others lose to HSDP 2 x 4:"):
        assert words in printed
    sections = tomllib.loads(out.read_text())
    assert sections["data"]["path"] == "outputs/data/spoken_digits/train"
    degrees = "data_parallel_replicate_degree", "data_parallel_shard_degree"
    assert sections["parallelism"] == dict(zip(degrees, (2, 4)))
    assert sections["training"]["max_local_batch_size"] == 8 and "ema" in sections
    assert "config_file" not in sections["job"] and "benchmark" not in sections
    assert out.read_text().startswith("# By titan-tts plan --suggest of ")
    # The plan of that file has the same figures.
    config = load_config(["--job.config_file", str(out)])
    same = make_plan(config, Cluster(H200, 4, 2), GUESS)
    row = next(line for line in printed.splitlines() if line.startswith("HSDP 2 x 4  "))
    assert f"{same.longest.mfu.estimate:.1%} (" in row
    assert row.split()[-1] == f"{same.peak_bucket.memory.total / GIB:.1f}"
    assert main(["plan", str(out), "--gpu", "H100", "--gpus", "8", "--gpus-per-node", "4"]) == 0
    printed = capsys.readouterr().out
    for words in ("H100", "a guess, not measured", "largest micro-batch", "MFU", "all-gather, f"):
        assert words in printed
    assert main(plan) == 2
    assert f"--out {out} exists; give another file" in capsys.readouterr().err
