"""Tensor parallelism: the same numbers as one process, on gloo and in float64."""

import pytest
import torch

from tests.helpers import tensor_parallel_ranks as ranks
from tests.helpers.fake_ranks import fake_process_group
from tests.helpers.small_models import random_model
from titan_tts.plan.step import Layout
from tools.harness.forked import run_ranks
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.infra.compat import functorch_config
from torchtitan.models.dit_tts.infra.compile import compiled_graphs
from torchtitan.models.dit_tts.model.attention import rotated_groups
from torchtitan.models.dit_tts.train_spec import get_train_spec

TP, TP_4, TP_DDP, TP_FSDP, TP_HSDP = (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)


def run(count, folder, *jobs, **options):
    run_ranks(ranks.run, count, count, folder, list(jobs), timeout_seconds=900, **options)


def job(function, *arguments, **options):
    return function, arguments, options


@pytest.mark.long
def test_two_ranks_train_as_one_process_does(tmp_path):
    jobs = [job(ranks.compare, TP, *ranks.COMPILED), job(ranks.compare, TP, *ranks.SEQUENCE)]
    for arguments in ([], ranks.COMPILED):
        # The sum begins before the product that does not need it, and so does a gather.
        jobs.append(job(ranks.overlap, TP, "mm all_reduce mm wait_tensor", *arguments))
        gathered = "gather_again mm wait_tensor reduce_scatter_tensor mm wait_tensor"
        jobs.append(job(ranks.overlap, TP, gathered, *arguments, *ranks.SEQUENCE))
    run(2, tmp_path, *jobs)


@pytest.mark.long
def test_four_ranks_train_as_one_process_does_and_load_other_layouts(tmp_path):
    checkpoints = job(ranks.checkpoints, tmp_path, [TP_FSDP], [ranks.PLAIN, TP_DDP])
    shipped = job(ranks.compare, TP_FSDP, *ranks.SEQUENCE)
    run(4, tmp_path, shipped, job(ranks.compare, TP_FSDP), checkpoints)


@pytest.mark.matrix
def test_every_layout_and_its_checkpoints(tmp_path):
    """Every layout loads the checkpoints of every other."""
    layouts = [ranks.PLAIN, (4, 1, 1), (1, 4, 1), (2, 2, 1), TP_4, TP_DDP, TP_FSDP]
    checkpoints = job(ranks.checkpoints, tmp_path, layouts, layouts)
    compared = [job(ranks.compare, each, steps=4) for each in (TP_4, TP_DDP)]
    compiled = [*ranks.COMPILED, *ranks.SEQUENCE]
    # Six frames on four ranks, which have two each.
    compared += [job(ranks.compare, each, *compiled, steps=4) for each in (TP_4, TP_DDP)]
    run(4, tmp_path, *compared, job(ranks.compare, TP_FSDP, *ranks.COMPILED), checkpoints)
    (tmp_path / "eight").mkdir()
    run(8, tmp_path / "eight", job(ranks.compare, TP_HSDP, steps=4))


@pytest.mark.parametrize("heads, degree", [(2, 2), (10, 2), (10, 5), (20, 4)])
def test_each_rank_has_its_part_of_the_rotated_heads(heads, degree):
    turned = [head < heads // 2 for head in range(heads)]
    parts = [rotated_groups(heads, degree, rank) for rank in range(degree)]
    own = heads // degree
    found = [part[head * len(part) // own] for part in parts for head in range(own)]
    assert found == turned
    assert all(own % len(part) == 0 for part in parts)
    assert max(map(len, parts)) <= 2 and min(map(len, parts)) == 1


@pytest.mark.long
@pytest.mark.parametrize("sequence", [[], ranks.SEQUENCE])
@pytest.mark.parametrize("mode", ["full", "memory_budget"])
def test_blocks_share_one_graph_without_a_break(mode, sequence):
    """Checkpointing can save what is in it: no mesh and no group."""
    # A budget is put back afterwards.
    budget = functorch_config.patch(activation_memory_budget=1.0)
    with budget, fake_process_group(Layout(1, 2, 2)) as dims:
        config = load_config(
            [*ranks.CONFIG, *ranks.COMPILED, *sequence, f"--activation_checkpoint.mode={mode}"]
        )
        model = get_train_spec().parallelize_fn(random_model(ranks.ARGS), dims, config)
        torch.compiler.reset()
        before = compiled_graphs()
        model(**ranks.batch(0)).square().sum().backward()
        assert compiled_graphs() - before == 1 and len(model.layers) == 2
