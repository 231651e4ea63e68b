"""TransformerEngine's layers on a stand-in for it: the numbers of the plain model, on gloo and in float64."""

import pytest

from tests.helpers import tensor_parallel_ranks as ranks
from tests.helpers import transformer_engine_ranks as te
from tools.harness.forked import run_ranks

PLAIN, TP, TP_4, DDP, FSDP, TP_FSDP = (
    (1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1), (1, 2, 1), (1, 2, 2)
)  # fmt: skip


def run(count, folder, *jobs):
    jobs = [(function, arguments, {}) for function, *arguments in ((te.install,), *jobs)]
    run_ranks(ranks.run, count, count, folder, jobs, timeout_seconds=900)


@pytest.mark.long
def test_two_ranks_execute_every_line(tmp_path):
    compared = [(te.engine, ranks.compare, each) for each in (TP, DDP)]
    loaded = [(te.materialized, each, tmp_path) for each in (TP, FSDP)]
    others = [(te.fp8, FSDP), (te.exact_products,), (te.gpu_check, tmp_path)]
    run(2, tmp_path, *compared, (te.packed, TP), *loaded, *others, (te.every_line_was_executed,))


@pytest.mark.matrix
def test_other_layouts(tmp_path):
    layouts = [PLAIN, TP_4, TP_FSDP]
    checkpoints = (te.engine, ranks.checkpoints, tmp_path, layouts, layouts)
    run(4, tmp_path, (te.packed, TP_4), (te.packed, TP_FSDP), checkpoints)
