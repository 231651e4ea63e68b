"""The effect of each factor on throughput and memory.

All of it works on y = log(figure), so that effects are ratios. A *cell* is the runs equal in all factors. An *effect* is
the mean of the differences of pairs of cell means; `smallest` and `largest` show how far it differs between them.

Rows are dictionaries, as `Run.row` makes them, of runs that were measured.
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
