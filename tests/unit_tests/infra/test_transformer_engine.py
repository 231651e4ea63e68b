"""TransformerEngine's layers on a stand-in for it: the numbers of the plain model, on gloo and in float64."""

import pytest

from tests.helpers import tensor_parallel_ranks as ranks
from tests.helpers import transformer_engine_ranks as te
from tools.harness.forked import run_ranks


def run(count, folder, *jobs):
    jobs = [(function, arguments, {}) for function, *arguments in ((te.install,), *jobs)]
    run_ranks(ranks.run, count, count, folder, jobs, timeout_seconds=900)


@pytest.mark.long
def test_two_ranks_execute_every_line(tmp_path):
    compared = [(te.engine, ranks.compare, each) for each in ((1, 1, 2), (2, 1, 1))]
    loaded = [(te.materialized, each, tmp_path) for each in ((1, 1, 2), (1, 2, 1))]
    others = [(te.packed, (1, 1, 2)), (te.fp8, (1, 2, 1)), (te.gpu_check, tmp_path)]
    run(2, tmp_path, *compared, *loaded, *others, (te.every_line_was_executed,))


@pytest.mark.matrix
def test_other_layouts(tmp_path):
    layouts = [ranks.PLAIN, (1, 1, 4), (1, 2, 2)]
    checkpoints = (te.engine, ranks.checkpoints, tmp_path, layouts, layouts)
    run(4, tmp_path, (te.packed, (1, 1, 4)), (te.packed, (1, 2, 2)), checkpoints)
