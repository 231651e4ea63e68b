"""The effect of each factor on throughput and memory; best configurations, their scaling, and growth with the batch.

Effects work on y = log(figure), so that they are ratios. A *cell* is the runs equal in all factors. An *effect* is
the mean of the differences of pairs of cell means; `smallest` and `largest` show how far it differs between them.

Rows are dictionaries, as `Run.row` makes them, of runs that were measured. `names`: the factors that vary.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from titan_tts.grids.runs import DATA

Row = Mapping[str, Any]
Cells = Mapping[tuple, np.ndarray]
"""Levels -> log(figure) of the runs that have them"""

NO_ALTERNATIVES = ("size", "device", "gpus", "nodes", "lengths", *DATA)
"""Runs that differ in these do not compete: the best is sought, and plots are drawn, for each."""

_NOT_COMPARED = ("batch", "gpus")
"""Growth with the batch and scaling over GPUs are tables of their own."""

_SIZES = ("debug", "8M", "18M", "60M", "300M", "800M", "3B", "8B")
_BASES: dict[str, tuple[str, ...]] = {
    "backend": ("torchtitan",),
    "layout": ("ddp", "fsdp"),
    "checkpointing": ("none",),
    "compile": ("off",),
    "precision": ("bf16", "fp32"),
    "attention": ("sdpa", "auto"),
    "optimizer": ("AdamW",),
}
"""Levels that others are compared with, the first that was measured"""


def repeat_deviation(cells: Cells) -> tuple[float, int]:
    """(standard deviation of log(figure) within cells, pooled; its degrees of freedom, 0 without repeats)."""
    df = sum(len(values) - 1 for values in cells.values())
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in cells.values())
    return (math.sqrt(squares / df), df) if df else (0.0, 0)


def level_order(value: Any) -> tuple:
    """Sorts levels: what is not given, numbers, model sizes, texts."""
    if value in _SIZES:
        return True, False, _SIZES.index(value)
    return isinstance(value, str), value is not None, 0 if value is None else value


def varying(rows: Sequence[Row], factors: Iterable[str]) -> list[str]:
    return [name for name in factors if len({row[name] for row in rows}) > 1]


def grouped(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple, list[Row]]:
    """The rows of each combination of levels of `names`, in the order of the levels."""
    found = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return {key: found[key] for key in sorted(found, key=lambda key: [*map(level_order, key)])}


def cells_of(rows: Iterable[Row], names: Sequence[str], figure: str) -> Cells:
    """The cells of the runs that have the figure above 0."""
    groups = grouped([row for row in rows if (row[figure] or 0) > 0], names)
    return {key: np.log([row[figure] for row in each]) for key, each in groups.items()}


def _together(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[str]]:
    """Factor -> later ones whose levels are one-to-one with its own, such as an axis "compile.mode" of
    the factor `compile`: nothing can tell their effects apart. Batch, accumulation and NO_ALTERNATIVES are
    never among them: what goes with a batch or with shorter data must not pass for the effect of a factor."""
    apart = (*_NOT_COMPARED, *NO_ALTERNATIVES, "accumulation")
    found: dict[str, list[str]] = {}
    for first, second in combinations([name for name in names if name not in apart], 2):
        pairs = {(row[first], row[second]) for row in rows}
        counts = {len({pair[side] for pair in pairs}) for side in (0, 1)} | {len(pairs)}
        known = sum(found.values(), [])
        if len(pairs) > 1 and len(counts) == 1 and not {first, second} & {*known}:
            found.setdefault(first, []).append(second)
    return found


def _best_batches(cells: Cells, names: Sequence[str]) -> Cells:
    """The fastest batch of each combination of the other factors, with None for the batch in its key."""
    best: dict[tuple, np.ndarray] = {}
    for key, values in cells.items():
        rest = tuple(None if n == "batch" else level for n, level in zip(names, key, strict=True))
        if rest not in best or values.mean() > best[rest].mean():
            best[rest] = values
    return best


def _estimate(cells: Cells, place: int, base: Any, level: Any) -> dict[str, Any]:
    """The effect, as a ratio, over the pairs of cells that are equal but in the factor at this place of their keys."""
    pairs = [
        (cell, cells[other])
        for key, cell in cells.items()
        if key[place] == base and (other := (*key[:place], level, *key[place + 1 :])) in cells
    ]
    if not pairs:
        return dict.fromkeys(("ratio", "smallest", "largest")) | {"pairs": 0}
    changes = [other.mean() - cell.mean() for cell, other in pairs]
    return {
        "ratio": math.exp(np.mean(changes)),
        "smallest": math.exp(min(changes)),
        "largest": math.exp(max(changes)),
        "pairs": len(pairs),
    }


def effects(rows: Sequence[Row], names: Sequence[str], figure: str) -> list[dict[str, Any]]:
    """Every level of every factor against the factor's base level, or where no pair of cells has both, against
    the first other one that has; for each model size: what a level is worth for one says little of another.

    `equal_batch` compares cells equal in every other factor, the batch too; `best_batch` the best batch of each
    side, but not of memory. `together`: factors that change with this one in all runs
    of the size, so that the effect is of all of them. `names`: the factors that vary.
    """
    table = []
    for (size,), of_size in grouped(rows, ["size"]).items():
        # Backend and degree of tensor parallelism may go together in one size only.
        followers = _together(of_size, names)
        own = [name for name in names if name not in sum(followers.values(), [])]
        cells = cells_of(of_size, own, figure)
        best = {} if figure.endswith("_gib") else _best_batches(cells, own)
        for place, factor in enumerate(own):
            if factor in _NOT_COMPARED:
                continue
            levels = sorted({row[factor] for row in of_size}, key=level_order)
            first = next((each for each in _BASES.get(factor, ()) if each in levels), levels[0])
            bases = [first]
            for level in (each for each in levels if each != first):
                for base in bases:
                    row = {"size": size, "factor": factor, "level": level, "base": base}
                    row["together"] = followers.get(factor, [])
                    row["equal_batch"] = _estimate(cells, place, base, level)
                    row["best_batch"] = _estimate(best, place, base, level)
                    if row["equal_batch"]["pairs"] or row["best_batch"]["pairs"]:
                        break
                table.append(row)
                bases.append(level)
    return table


LARGEST_FALL = 0.02
"""A fall by at most this fraction is taken for noise."""

SPEED = "samples_per_second"


def kept_apart(names: Sequence[str]) -> list[str]:
    """NO_ALTERNATIVES, as far as they vary."""
    return [name for name in NO_ALTERNATIVES if name in names]


def means(rows: Sequence[Row], names: Sequence[str], figures: Sequence[str]) -> list[dict]:
    """One row per cell: its levels, `runs`, and the arithmetic mean of each figure that its runs have."""
    table = []
    for key, each in grouped(rows, names).items():
        row = dict(zip(names, key, strict=True)) | {"runs": len(each)}
        for figure in figures:
            values = [one[figure] for one in each if one[figure] is not None]
            row[figure] = float(np.mean(values)) if values else None
        table.append(row)
    return table


def growth(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """Finds where samples/s, and with them MFU, fall by more than LARGEST_FALL from one batch to the next larger one of
    the same configuration."""
    lines: dict[tuple, list] = defaultdict(list)
    for row in means(rows, names, (SPEED,)) if "batch" in names else ():
        levels = {name: row[name] for name in names if name != "batch"}
        lines[tuple(levels.items())].append(row)  # in the order of the batches
    steps = [(key, *pair) for key, line in lines.items() for pair in zip(line, line[1:])]
    falls = []
    for configuration, before, after in steps:
        ratio = after[SPEED] / before[SPEED]
        if ratio < 1 - LARGEST_FALL:
            row = {"configuration": dict(configuration), "batch": before["batch"]}
            falls.append({**row, "next_batch": after["batch"], "ratio": ratio})
    verdict = "cannot tell" if not steps else "fail" if falls else "pass"
    return {"verdict": verdict, "pairs": len(steps), "falls": falls}


def best(rows: Sequence[Row], names: Sequence[str], figures: Sequence[str]) -> list[dict[str, Any]]:
    """Return the cell of the highest mean throughput for each combination of NO_ALTERNATIVES."""
    groups = grouped(means(rows, names, figures), kept_apart(names)).values()
    return [dict(max(group, key=lambda row: row[SPEED])) for group in groups]


def scaling(rows: Sequence[Row], names: Sequence[str]) -> list[dict[str, Any]]:
    """Throughput over GPUs at equal micro-batch and equal everything else but `nodes`, of the fewest nodes.

    A run on one data-parallel rank ("single") is the first point of every layout's curve; so is FSDP2 on one node of
    HSDP's. `efficiency` is throughput per GPU over that at the curve's smallest number of GPUs.
    """
    others = [name for name in names if name not in ("gpus", "nodes")]
    layouts = {row["layout"] for row in rows} - {"single"}
    curves: dict[tuple, dict[int, dict]] = defaultdict(dict)
    table = means(rows, [*others, "gpus", "nodes"], (SPEED, "mfu"))
    for row in sorted(table, key=lambda row: (row["nodes"], row.get("layout") == "fsdp")):
        own = row.get("layout")
        starts_hsdp = own == "fsdp" and row["nodes"] == 1
        for layout in layouts if own == "single" else {own, "hsdp"} if starts_hsdp else {own}:
            configuration = {name: row[name] for name in others}
            configuration |= {} if layout is None else {"layout": layout}
            curves[tuple(configuration.items())].setdefault(row["gpus"], row)
    result = []
    for key, curve in curves.items():
        first = min(curve)
        points = [
            {name: row[name] for name in ("gpus", "nodes", SPEED, "mfu")}
            | {"efficiency": row[SPEED] / gpus / (curve[first][SPEED] / first)}
            for gpus, row in sorted(curve.items())
        ]
        layout = dict(key).get("layout")
        if len(points) > 1 and any(row.get("layout") == layout for row in curve.values()):
            result.append({"configuration": dict(key), "points": points})
    return sorted(result, key=lambda row: -row["points"][-1][SPEED])
