"""Growth with the batch, the best and scaling, on small tables with known answers."""

import pytest

from tests.helpers.benchmark_runs import BASE, combinations, true_speed
from titan_tts.grids.effects import best, growth, scaling, varying

NAMES = list(BASE)
SPEED = "samples_per_second"


def rows_of(*values, **factors):
    """Rows of batches 1, 2, 4 ..., each value a list of repeats."""
    return [
        BASE | {"batch": 2**number, SPEED: value} | factors
        for number, repeats in enumerate(values)
        for value in repeats
    ]


def matched(rows, *more):
    return rows, varying(rows, [*NAMES, *more])


def test_a_fall_fails_and_is_named():
    rows = rows_of([10, 10.1], [14, 14.1], [12, 12.1])
    rows += rows_of([10, 10.1], [14, 14.1], [15, 15.1], compile="default")
    found = growth(*matched(rows))
    assert (found["verdict"], found["pairs"]) == ("fail", 4)
    (fall,) = found["falls"]
    assert fall["configuration"] == {"compile": "off"}
    assert (fall["batch"], fall["next_batch"]) == (2, 4)
    assert fall["ratio"] == pytest.approx((12 + 12.1) / (14 + 14.1))


@pytest.mark.parametrize(
    "values, verdict",
    [
        ([[10, 10], [14, 15], [14.4, 14.2]], "pass"),  # of means
        ([[10], [9.81]], "pass"),  # 2 % are the limit
        ([[10], [9.79]], "fail"),
        ([[10, 11]], "cannot tell"),  # a single batch
    ],
)
def test_verdicts_of_growth(values, verdict):
    assert growth(*matched(rows_of(*values)))["verdict"] == verdict


def test_the_best_is_by_the_mean_of_repeats_and_shorter_data_do_not_compete():
    """They would have the higher throughput whatever else is slower; also where all else changes with them."""
    (row,) = best(*matched(rows_of([9, 9, 12], [14, 14, 1])), (SPEED,))
    assert row == {"batch": 1, "runs": 3, SPEED: 10}
    rows = rows_of([10], **{"data.max_frames": 1024, "compile": "default"})
    rows += rows_of([40], **{"data.max_frames": 256})
    found = [
        (row["data.max_frames"], row[SPEED])
        for row in best(*matched(rows, "data.max_frames"), (SPEED,))
    ]
    assert found == [(256, 40), (1024, 10)]


def test_scaling_from_one_gpu_for_every_layout():
    grid = combinations(layout=["single"], gpus=[1], batch=[4, 8])
    grid += combinations(layout=["fsdp", "ddp"], gpus=[4, 8, 16], batch=[4])
    grid = [each | {"nodes": -(-each["gpus"] // 8)} for each in grid]
    rows = [each | {SPEED: true_speed(each), "mfu": None} for each in grid]
    # Listed first and left out: four GPUs of two nodes.
    spread = [each | {"nodes": 2, SPEED: each[SPEED] / 2} for each in rows if each["gpus"] == 4]
    curves = scaling(*matched([*spread, *rows]))
    assert {curve["configuration"]["layout"] for curve in curves} == {"fsdp", "ddp"}
    for curve in curves:
        assert curve["configuration"]["batch"] == 4
        points = [(point["gpus"], point["nodes"]) for point in curve["points"]]
        assert points == [(1, 1), (4, 1), (8, 1), (16, 2)]
        efficiency = [point["efficiency"] for point in curve["points"]]
        assert efficiency == pytest.approx([1, 4**-0.07, 8**-0.07, 16**-0.07])


def test_mfu_over_nodes():
    """By tensor parallelism from its one group, and by HSDP from FSDP2 on one node."""
    group = {"size": "8B", "backend": "megatron", "tensor_parallel": 4}
    rows = [
        BASE | {"layout": layout, "gpus": gpus, "nodes": gpus // 4, SPEED: speed, "mfu": mfu} | more
        for layout, gpus, more, speed, mfu in (
            *(("single", 4, group, 10.0, 0.40), ("ddp", 16, group, 36.0, 0.36)),
            *(("fsdp", 4, {"size": "3B"}, 20.0, 0.5), ("hsdp", 16, {"size": "3B"}, 76.0, 0.45)),
            ("hsdp", 64, {"size": "3B"}, 256.0, None),
        )
    ]
    found = [
        (curve["configuration"]["layout"], p["gpus"], p["efficiency"], p["mfu"])
        for curve in scaling(*matched(rows))
        for p in curve["points"]
    ]
    assert found == [
        *(("hsdp", 4, 1, 0.50), ("hsdp", 16, 0.95, 0.45), ("hsdp", 64, 0.8, None)),
        *(("ddp", 4, 1, 0.40), ("ddp", 16, 0.9, 0.36)),
    ]
