"""Planted effects are found, and confounders are not taken for effects."""

import math

import pytest

from tests.helpers.benchmark_runs import BASE, combinations, true_speed
from titan_tts.grids.effects import cells_of, effects, repeat_deviation, varying

NAMES = list(BASE)
SPEED = "samples_per_second"


def rows_of(factors, speed=true_speed):
    return [each | {SPEED: speed(each)} for each in factors]


def found_of(rows, figure=SPEED, *more):
    return effects(rows, varying(rows, [*NAMES, *more]), figure)


def effect(rows, factor, level):
    table = found_of(rows)
    (row,) = (row for row in table if (row["factor"], row["level"]) == (factor, level))
    return row


def test_without_noise_effects_are_exact():
    two = {"compile": ["off", "default"], "checkpointing": ["none", "full"]}
    rows = rows_of(combinations(batch=[2, 4, 8], **two))
    compiled = effect(rows, "compile", "default")
    assert compiled["equal_batch"]["ratio"] == pytest.approx(math.sqrt(1.3 * 1.15))
    extremes = compiled["equal_batch"]["smallest"], compiled["equal_batch"]["largest"]
    assert extremes == pytest.approx((1.15, 1.3)) and compiled["equal_batch"]["pairs"] == 6
    full = effect(rows, "checkpointing", "full")["equal_batch"]
    assert full["ratio"] == pytest.approx(0.8 * math.sqrt(1.15 / 1.3))


def test_factors_that_go_together_in_a_size_and_levels_that_never_meet_the_base():
    """Tensor parallelism, of another degree for each size, needs another backend; HSDP was not run by it. 3B is
    before 8B."""
    table = []
    for size, degree in (("8B", 4), ("3B", 2)):
        levels = ("ddp", degree, 8.0), ("fsdp", degree, 6.0), ("fsdp", 1, 10.0), ("hsdp", 1, 12.0)
        for layout, tensor, speed in levels:
            row = {"size": size, "layout": layout, "tensor_parallel": tensor, SPEED: speed}
            table.append(BASE | row | {"backend": "torchtitan" if tensor == 1 else "megatron"})
    keys = "size", "factor", "together", "level", "base"
    found = [(*(row[key] for key in keys), row["equal_batch"]["ratio"]) for row in found_of(table)]
    assert found == [
        row
        for size in ("3B", "8B")
        for row in (
            (size, "backend", ["tensor_parallel"], "megatron", "torchtitan", pytest.approx(0.6)),
            (size, "layout", [], "fsdp", "ddp", pytest.approx(0.75)),
            (size, "layout", [], "hsdp", "fsdp", pytest.approx(1.2)),
        )
    ]


def test_an_effect_is_the_mean_of_pairs_of_cell_means_and_repeats_deviate_within_cells():
    """Differences 0.4 and 0.6 of cells of 2, 1, 3 and 1 runs."""
    cells = (2, "off", (1.0, 1.2)), (2, "default", (1.5,))
    cells += (4, "off", (5.0, 5.1, 5.2)), (4, "default", (5.7,))
    rows = [
        BASE | {"batch": batch, "compile": compiled, SPEED: math.exp(y)}
        for batch, compiled, values in cells
        for y in values
    ]
    found = effect(rows, "compile", "default")["equal_batch"]
    expected = [math.exp(y) for y in (0.5, 0.4, 0.6)]
    assert [found[name] for name in ("ratio", "smallest", "largest")] == pytest.approx(expected)
    deviation, degrees = repeat_deviation(cells_of(rows, ["batch", "compile"], SPEED))
    assert (deviation, degrees) == (pytest.approx(math.sqrt(0.04 / 3)), 3)
    assert repeat_deviation(cells_of(rows[2:3], ["batch"], SPEED)) == (0, 0)


def test_at_best_batch_what_memory_allows_counts():
    """Full checkpointing is slower at equal batch, but alone fits batch 64."""
    rows = rows_of(combinations(batch=[1, 2], checkpointing=["none"]))
    rows += rows_of(combinations(batch=[1, 2, 64], checkpointing=["full"]))
    found = effect(rows, "checkpointing", "full")
    assert found["equal_batch"]["ratio"] == pytest.approx(0.8)
    assert found["best_batch"]["ratio"] == pytest.approx(0.8 * (64 / 67) / (2 / 5))
    rows = [row for row in rows if row["batch"] in (2, 64)]
    apart = [row for row in rows if (row["batch"] == 2) == (row["checkpointing"] == "none")]
    found = effect(apart, "checkpointing", "full")
    assert found["equal_batch"]["pairs"] == 0 and found["equal_batch"]["ratio"] is None
    assert found["best_batch"]["pairs"] == 1


def test_memory_is_compared_at_equal_batch_alone():
    rows = combinations(batch=[1, 2], checkpointing=["none", "full"])
    rows = [
        each | {"peak_reserved_gib": 20.0 if each["checkpointing"] == "none" else 10.0}
        for each in rows
    ]
    (row,) = found_of(rows, "peak_reserved_gib")
    assert row["equal_batch"]["ratio"] == pytest.approx(0.5) and row["best_batch"]["pairs"] == 0


def test_accumulation_gpus_and_nodes_must_be_equal():
    rows = rows_of(combinations(batch=[2, 8], compile=["off", "default"], accumulation=[1, 4]))
    compiled = effect(rows, "compile", "default")
    assert (compiled["equal_batch"]["pairs"], compiled["best_batch"]["pairs"]) == (4, 2)
    grid = combinations(layout=["ddp", "fsdp"], gpus=[8, 16])
    grid = [each | {"nodes": each["gpus"] // 8} for each in grid]
    grid += combinations(layout=["single"], gpus=[1])
    table = {row["level"]: row["equal_batch"]["pairs"] for row in found_of(rows_of(grid))}
    assert (table["fsdp"], table["single"]) == (2, 0)


def test_an_axis_that_sets_a_factor_prevents_no_pair_and_a_batch_is_never_taken_for_a_factor():
    grid = combinations(batch=[2, 8], compile=["off", "default"])
    rows = [each | {"compile.mode": f"mode {each['compile']}"} for each in rows_of(grid)]
    (found,) = found_of(rows, SPEED, "compile.mode")
    assert (found["factor"], found["together"]) == ("compile", ["compile.mode"])
    assert found["equal_batch"]["ratio"] == pytest.approx(1.3)
    confounded = [row for row in rows if (row["batch"] == 2) == (row["compile"] == "off")]
    assert effect(confounded, "compile", "default")["equal_batch"]["pairs"] == 0


@pytest.mark.parametrize(
    "factor, levels, base, others",
    [
        ("compile", ["max-autotune", "off", "default"], "off", ["default", "max-autotune"]),
        ("size", ["8B", "300M", "800M"], None, []),  # each size has a table of its own
        ("attention", ["varlen", None, "matmul"], None, ["matmul", "varlen"]),
        ("optimizer", [0.1, 0.01], 0.01, [0.1]),
    ],
)
def test_base_levels_and_their_order(factor, levels, base, others):
    table = found_of(rows_of(combinations(**{factor: levels}), speed=lambda each: 1.0))
    assert [(row["base"], row["level"]) for row in table] == [(base, each) for each in others]
