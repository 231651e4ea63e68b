"""A grid's file, and the runs that it means."""

import os
from pathlib import Path

import pytest

from titan_tts.grids.cells import Cells
from titan_tts.grids.grid_file import read_grid
from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "train_configs" / "debug.toml"


def grid(folder: Path, text: str, options: str = ""):
    path = folder / "mine.toml"
    path.write_text(f'[grid]\nconfig = "{DEBUG}"\n{options}\n{text}')
    return read_grid(path)


def cells(folder: Path, text: str, options: str = ""):
    return Cells(grid(folder, text, options), folder / "mine").all()


def test_every_combination_by_growing_batch_and_all_before_any_is_repeated(tmp_path):
    axes = '[axes]\nbatch = [4, 1]\nlayout = ["fsdp", "ddp"]'
    found = cells(tmp_path, axes, "gpus = 2\nrepeats = 2")
    assert [(c.repeat, c.axes["layout"], c.batch) for c in found] == [
        (repeat, layout, batch)
        for repeat in (0, 1)
        for layout in ("fsdp", "ddp")
        for batch in (1, 4)
    ]
    assert found[0].name == "dit_debug_bs1_ps1_actnone_coff_fp32_p1x2_r0"
    assert found[-1].name == "dit_debug_bs4_ps1_actnone_coff_fp32_p2x1_r1"
    assert not any(cell.refused for cell in found)
    assert len({cell.group for cell in found}) == 2
    assert found[0].folder == tmp_path / "mine" / found[0].name


# The values of an axis, and what the last one sets.
AXES = [
    ("layout", ["fsdp", "ddp", "hsdp"], ("parallelism.data_parallel_replicate_degree", 2)),
    ("layout", ["ddp", "2x2", "1x4"], ("parallelism.data_parallel_shard_degree", 4)),
    ("checkpointing", ["none", "every 2"], ("activation_checkpoint.selective_ac_option", "2")),
    ("checkpointing", ["full", "op"], ("activation_checkpoint.mode", "selective")),
    ("checkpointing", ["op", "full"], ("activation_checkpoint.mode", "full")),
    ("checkpointing", ["memory_budget 0.9"], ("activation_checkpoint.memory_budget", 0.9)),
    ("compile", ["default", "off"], ("compile.enable", False)),
    ("compile", ["off", "default"], ("compile.enable", True)),
    ("precision", ["fp32", "bf16"], ("training.mixed_precision_param", "bfloat16")),
    ("precision", ["bf16", "fp8"], ("model.converters", ["float8"])),
    ("attention", ["varlen", "sdpa"], ("attention.backend", "sdpa")),
    ("optimizer.state_dtype", ["float32", "8bit"], ("optimizer.state_dtype", "8bit")),
]


@pytest.mark.parametrize("axis, values, expected", AXES)
def test_what_an_axis_sets(tmp_path, axis, values, expected):
    """Its value is the run's factor of that name, but for a layout by numbers."""
    found = cells(tmp_path, f'[axes]\n"{axis}" = {values}\nbatch = [2]', "gpus = 4")
    (section, name), wanted = expected[0].split("."), expected[1]
    assert found[-1].content[section][name] == wanted
    named = {"1x4": "fsdp", "2x2": "hsdp"}
    assert [cell.factors[axis] for cell in found] == [named.get(value, value) for value in values]


def test_batches_and_steps(tmp_path):
    axes = "[axes]\nbatch = [3]\naccumulation = [2]\n[settings]\ndata.max_frames = 40"
    (cell,) = cells(tmp_path, axes, "gpus = 4\nsteps = 30\ncounted_steps = 5")
    training, benchmark = cell.config.training, cell.config.benchmark
    assert (training.local_batch_size, training.global_batch_size) == (3, 24)
    assert cell.config.data.batch_multiple == 8 and cell.config.data.max_frames == 40
    assert (benchmark.warmup_steps, benchmark.steps, benchmark.lengths) == (25, 5, "longest")
    (mixed,) = cells(tmp_path, "", 'lengths = "mixed"\nsteps = 30')
    assert (mixed.config.benchmark.warmup_steps, mixed.config.benchmark.steps) == (3, 30)


def test_exclusions_extra_runs_axes_of_config_keys_and_axes_that_change_together(tmp_path):
    text = """
[axes]
"optimizer.lr" = [0.1, 0.2]
"size, layout, batch" = [["debug", "ddp", 3], ["one_gpu", "fsdp", 5]]
[[exclude]]
"optimizer.lr" = 0.2
size = "one_gpu"
[[extra]]
"debug.seed" = 5
"layout, batch" = [["2x2", 7], ["1x4", 9]]
"""
    found = cells(tmp_path, text, "gpus = 4")
    levels = [f"{c.batch} {c.factors['size']} {c.factors['layout']}" for c in found]
    assert levels == ["3 debug ddp", "5 60M fsdp", "3 debug ddp", "7 debug hsdp", "9 debug fsdp"]
    assert [c.factors["optimizer.lr"] for c in found] == [0.1, 0.1, 0.2, 0.1, 0.1]
    assert found[-1].factors["debug.seed"] == 5 and found[-1].config.debug.seed == 5
    assert len({cell.name for cell in found}) == 5


@pytest.mark.long
def test_what_training_refuses_is_known_before(tmp_path):
    text = '[axes]\nlayout = ["ddp", "hsdp"]\ncompile = ["off", "reduce-overhead"]\nbatch = [1]'
    found = {
        (c.axes["layout"], c.axes["compile"]): c.refused for c in cells(tmp_path, text, "gpus = 2")
    }
    assert not found["ddp", "off"] and "CUDA graphs" in found["ddp", "reduce-overhead"]
    (single,) = cells(tmp_path, '[axes]\nlayout = ["hsdp"]\nbatch = [1]')
    (nodes,) = cells(tmp_path, '[axes]\nlayout = ["hsdp"]', "gpus = 32\ngpus_per_node = 8")
    assert "global_batch_size" in nodes.refused  # 16 samples for 32 ranks
    assert nodes.content["parallelism"]["data_parallel_replicate_degree"] == 4  # one per node
    assert nodes.content["parallelism"]["data_parallel_shard_degree"] == 8
    assert single.refused == "1 GPUs have no layout hsdp" and single.factors["layout"] == "hsdp"
    assert len(cells(tmp_path, '[axes]\nlayout = ["ddp", "fsdp", "hsdp"]\ngpus = [1, 2]')) == 6
    sizes = cells(tmp_path, '[axes]\nsize = ["debug", "800m"]\nbatch = [1]')
    assert [cell.config.model.flavor for cell in sizes] == ["debug", "800M"]


BATCH = "[axes]\nbatch = [1]\n"
MISTAKES = [
    ('[axes]\nlayuot = ["ddp"]', "", "there is no axis 'layuot'"),
    ('[axes]\nlayout = ["dpp"]', "", r"\[axes\] layout has 'dpp'"),
    ('[axes]\ncheckpointing = ["every x"]', "", "'every x'"),
    ("[axes]\nbatch = [0]", "", r"\[axes\] batch has 0"),
    ("[axes]\nbatch = [1, 1]", "", "each once"),
    ("[axes]\naccumulation = [2]", "", "needs an axis batch"),
    (BATCH + "[[exclude]]\nbatch = true", "", "which no axis has"),
    (BATCH + "[[extra]]\nbatch = 1", "", "two runs have the same name"),
    ('[axes]\n"optimizer.lrr" = [1]', "", r"\[optimizer\] lrr: did you mean lr"),
    ("", "repeats = 0", "repeats = 0"),
    ("", "steps = 5\ncounted_steps = 5", "counted_steps = 5"),
    ('[axes]\nprecision = [["fp8"]]', "", "its values are words or numbers"),
    ('[axes]\n"data.max_frames.x" = [32]', "", "there is no key data.max_frames.x"),
    ("", 'dump_folder = "s3://bucket/x"', "must be a local folder"),
    ("[axes", "", "mine.toml is not valid: "),
    ('[axes]\n"layout, batch" = [["ddp", 1, 2]]', "", "it needs a list of 2"),
    ('[axes]\nbatch = [1]\n"layout, batch" = [["ddp", 1]]', "", "but each must be there once"),
]


@pytest.mark.parametrize("text, options, words", MISTAKES)
def test_mistakes_are_one_sentence(tmp_path, text, options, words):
    with pytest.raises(InputError, match=words):
        cells(tmp_path, text, options)


def test_a_missing_file_and_a_missing_config(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_grid(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(InputError, match="config is missing"):
        read_grid(tmp_path / "empty.toml")
    with pytest.raises(InputError, match="one of: 800m, 8b, autotune, debug, table"):
        find_config("80m", "ablations", "grid")


SHIPPED = [("800m", 260), ("8b", 198), ("autotune", 27), ("debug", 50), ("table", 60)]


@pytest.mark.long
@pytest.mark.parametrize("name, runs", SHIPPED)
def test_shipped_grids(name, runs, tmp_path):
    """None has a run that training refuses; each has its script. The table has its predecessor's layouts, and HSDP
    within nodes."""
    found = Cells(read_grid(find_config(name, "ablations", "grid")), tmp_path).all()
    assert len(found) == runs
    assert not [cell.refused for cell in found if cell.refused]
    script = ROOT / "scripts" / f"run_ablations_{name}.sh"
    assert script.read_text().endswith(f'/ablate.sh" {name} "$@"\n') and os.access(script, os.X_OK)
    if name != "table":
        return
    rows = [cell.factors | vars(cell.config.parallelism) for cell in found]
    keys = "size", "tensor_parallel", "layout", "gpus", "nodes", "data_parallel_replicate_degree"
    assert {tuple(row[key] for key in keys) for row in rows} >= {
        *(("800M", 1, "ddp", gpus, gpus // 4, gpus) for gpus in (4, 16, 64)),
        *(("3B", 2, "ddp", gpus, gpus // 4, gpus // 2) for gpus in (4, 16, 64)),
        *(("8B", 4, "ddp", gpus, gpus // 4, gpus // 4) for gpus in (16, 64)),
        ("8B", 4, "single", 4, 1, 1),
        *((size, 1, "hsdp", 64, 16, 16) for size in ("800M", "3B", "8B")),
    }
