"""TransformerEngine's layers on a stand-in for it: the numbers of the plain model, on gloo and in float64. Each job
asserts in its ranks, and a rank that fails has a traceback in the failure of `run_ranks`."""

import pytest

from tests.helpers import tensor_parallel_ranks as ranks
from tests.helpers import transformer_engine_ranks as te
from tools.harness.forked import run_ranks


def run(count, folder, *jobs):
    jobs = [(function, arguments, {}) for function, *arguments in ((te.install,), *jobs)]
    run_ranks(ranks.run, count, count, folder, jobs, timeout_seconds=900)


@pytest.mark.long
def test_two_ranks_train_as_one_process_does(tmp_path):
    compared = [((1, 1, 2),), ((2, 1, 1),), ((1, 1, 2), te.ATTENTION)]
    jobs = [(te.engine, ranks.compare, *each) for each in compared]
    jobs += [(te.materialized, each, tmp_path) for each in ((1, 1, 2), (1, 2, 1))]
    run(2, tmp_path, *jobs, (te.fp8, (1, 2, 1)))


@pytest.mark.matrix
def test_other_layouts(tmp_path):
    layouts = [(1, 1, 4), (1, 2, 2)]
    packed = [(te.engine, ranks.compare, each, te.ATTENTION) for each in layouts]
    layouts.append(ranks.PLAIN)
    run(4, tmp_path, *packed, (te.engine, ranks.checkpoints, tmp_path, layouts, layouts))
