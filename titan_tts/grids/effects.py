"""What each factor does to throughput, with the uncertainty that repeats show.

All of it works on y = log(figure), so that effects are ratios and noise is relative.

- A *cell* is the runs equal in all factors; its mean is y's over its n repeats.
- *Noise*: s² = Σ_cells Σ_runs (y - cell mean)² / df with df = Σ_cells (n - 1), the pooled variance. Without
  any repeat df = 0, and there are no intervals.
- An *estimate* is a mean over P independent differences of cell means, each with weights ±1:
  m = mean(d), se² = s² / P² · Σ (1/n over all cells of all differences), interval m ± t(0.975, df) · se,
  and exp of each as a ratio. It is about the mean over just these pairs: how far a factor's effect differs
  from pair to pair is in `smallest` and `largest`, not in the interval.

Rows are dictionaries, as `Run.row` makes them, of runs that were measured.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.special import stdtrit

from titan_tts.grids.runs import DATA

Row = Mapping[str, Any]
Pair = tuple[dict[str, Any], np.ndarray, np.ndarray]
"""Levels in which two cells are equal, and log(figure) at the base and at the level"""

LEVEL = 0.95
NOT_COMPARED = ("batch", "gpus", "global_batch")
"""No effects of these are listed: growth with the batch and scaling over GPUs are tables of their own."""

NO_ALTERNATIVES = ("size", "device", "gpus", "nodes", "lengths", *DATA)
"""Runs that differ in these do not compete: the best is sought, and fronts are drawn, for each."""

_BASES = {
    "size": ("debug", "18M", "60M", "300M", "800M", "3B", "8B"),
    "backend": ("torchtitan",),
    "compile": ("off",),
    "checkpointing": ("none",),
    "precision": ("bf16", "fp32"),
    "attention": ("sdpa", "auto"),
    "optimizer": ("AdamW",),
    "layout": ("ddp", "fsdp"),
}
"""Levels that others are compared with, the first that was measured"""

_OUTLIER = 0.02

# Differences below it are rounding, where repeats agree to the last digit.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Noise:
    """Pooled variance of log(figure) between repeats, and its degrees of freedom (0: not known)."""

    variance: float
    df: int

    def half_width(self, inverse_counts: float, tail: float = (1 - LEVEL) / 2) -> float | None:
        """Half an interval's width: t · s · √(Σ w²/n), where `inverse_counts` is Σ w²/n and `tail` the
        probability above it; None without repeats."""
        if self.df == 0:
            return None
        quantile = float(stdtrit(self.df, 1 - tail))  # Student's t
        return max(_ROUNDING, quantile * math.sqrt(self.variance * inverse_counts))


def level_order(value: Any) -> tuple:
    """Sorts levels: what is not given, numbers, model sizes, texts."""
    sizes = _BASES["size"]
    if value in sizes:
        return True, False, sizes.index(value)
    return isinstance(value, str), value is not None, 0 if value is None else value


def levels(rows: Iterable[Row], factor: str) -> list[Any]:
    """A factor's distinct values in order."""
    return sorted({row[factor] for row in rows}, key=level_order)


def base_level(rows: Sequence[Row], factor: str) -> Any:
    """The level that others are compared with: a neutral one, else the smallest number or first text."""
    found = levels(rows, factor)
    return next((level for level in _BASES.get(factor, ()) if level in found), found[0])


def global_batch(row: Row) -> int | None:
    """Samples of an optimizer step; None where a factor is not known."""
    if None in (row["gpus"], row["tensor_parallel"], row["batch"], row["accumulation"]):
        return None
    return row["batch"] * row["accumulation"] * (row["gpus"] // row["tensor_parallel"])


def matched_factors(
    measured: Sequence[Row], factors: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The factors on which two runs of a comparison must agree; and the rows with all of them.

    A factor that is constant is left out. So that one that follows from another prevents no pair:

    - Of factors that always change together (see `together`) the first stands for all.
    - Where the global batch is fixed, `accumulation` follows from micro-batch and ranks. Then
      `global_batch` (micro-batch × accumulation × data-parallel ranks) takes its place: at equal batch
      and GPUs accumulation is equal with it, and best batches are compared for equal optimizer steps.
    - `nodes`, `layout` and `tensor_parallel` must agree: the comparison over GPUs is `scaling`.
    """
    rows = [dict(row) for row in measured]
    varying = [name for name in factors if len({row[name] for row in rows}) > 1]
    followers = {name for names in together(rows, varying).values() for name in names}
    varying = [name for name in varying if name not in followers]
    if "accumulation" in varying:
        derived = ("batch", "accumulation", "gpus", "nodes", "layout", "tensor_parallel")
        others = [name for name in varying if name not in derived]
        totals = defaultdict(set)
        for row in rows:
            row["global_batch"] = global_batch(row)
            totals[key_of(row, others)].add(row["global_batch"])
        if all(len(each) == 1 for each in totals.values()):
            varying = ["global_batch" if name == "accumulation" else name for name in varying]
            if len(set.union(*totals.values())) == 1:
                varying.remove("global_batch")
    return rows, varying


def together(rows: Sequence[Row], factors: Sequence[str]) -> dict[str, list[str]]:
    """Factor -> later ones whose levels are one-to-one with its own, such as an axis "compile.mode" of
    the factor `compile`: nothing can tell their effects apart. Batch, accumulation and NO_ALTERNATIVES are
    never among them: what goes with a batch or with shorter data must not pass for the effect of a factor."""
    apart = (*NOT_COMPARED, *NO_ALTERNATIVES, "accumulation")
    found: dict[str, list[str]] = {}
    followers: set[str] = set()
    for first, second in combinations([name for name in factors if name not in apart], 2):
        pairs = {(row[first], row[second]) for row in rows}
        counts = {len({pair[side] for pair in pairs}) for side in (0, 1)} | {len(pairs)}
        if len(pairs) > 1 and len(counts) == 1 and first not in followers:
            found.setdefault(first, []).append(second)
            followers.add(second)
    return found


def key_of(row: Row, names: Iterable[str]) -> tuple:
    """The row's levels of these factors."""
    return tuple(row[name] for name in names)


def grouped(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple, list[Row]]:
    """The rows of each combination of levels of `names`, in the order of the levels."""
    found = defaultdict(list)
    for row in rows:
        found[key_of(row, names)].append(row)
    return {key: found[key] for key in sorted(found, key=lambda key: [*map(level_order, key)])}


def cells(rows: Iterable[Row], names: Sequence[str], figure: str) -> dict[tuple, np.ndarray]:
    """Levels of `names` -> log(figure) of the runs that have it above 0."""
    found = defaultdict(list)
    for row in rows:
        if row[figure] is not None and row[figure] > 0:
            found[key_of(row, names)].append(math.log(row[figure]))
    return {key: np.array(values) for key, values in found.items()}


def pooled_noise(found: Mapping[tuple, np.ndarray]) -> Noise:
    """The variance within cells; see the module."""
    df = sum(len(values) - 1 for values in found.values())
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in found.values())
    return Noise(squares / df if df else 0.0, df)


def _estimate(pairs: Sequence[Pair], noise: Noise) -> dict[str, Any]:
    """Mean over pairs of the difference of their cells' means, as a ratio. `farthest` names the configuration
    whose pair differs most from the mean, by more than _OUTLIER; of two such pairs, the one with the smaller ratio."""
    count = len(pairs)
    if not count:
        return dict.fromkeys(("ratio", "low", "high", "smallest", "largest")) | {"pairs": 0}
    differences = [float(level.mean() - base.mean()) for _, base, level in pairs]
    mean = float(np.mean(differences))
    half = noise.half_width(
        sum(1 / len(base) + 1 / len(level) for _, base, level in pairs) / count**2
    )
    distances = [round(abs(difference - mean), 9) for difference in differences]
    _, _, farthest = max(zip(distances, [-each for each in differences], range(count), strict=True))
    return {
        "ratio": math.exp(mean),
        "low": None if half is None else math.exp(mean - half),
        "high": None if half is None else math.exp(mean + half),
        "smallest": math.exp(min(differences)),
        "largest": math.exp(max(differences)),
        "pairs": count,
        "farthest": {"configuration": pairs[farthest][0], "ratio": math.exp(differences[farthest])}
        if distances[farthest] > _OUTLIER
        else None,
    }


def _pairs(
    found: Mapping[tuple, np.ndarray], names: Sequence[str], factor: str, base: Any, level: Any
) -> list[Pair]:
    """Pairs of cells that are equal but for the factor."""
    pairs, apart = [], (factor, "size")
    for key, cell in found.items():
        row = dict(zip(names, key, strict=True))
        other = found.get(key_of(row | {factor: level}, names))
        if row[factor] == base and other is not None:
            equal = {n: v for n, v in row.items() if n not in apart and v is not None}
            pairs.append((equal, cell, other))
    return pairs


def _best_cells(found: Mapping[tuple, np.ndarray], names: Sequence[str]) -> dict[tuple, np.ndarray]:
    """For each combination of the other factors the cell of the batch with the highest mean, with None for the batch
    in its key."""
    if "batch" not in names:
        return dict(found)
    best: dict[tuple, np.ndarray] = {}
    for key, values in found.items():
        rest = key_of(dict(zip(names, key, strict=True)) | {"batch": None}, names)
        if rest not in best or values.mean() > best[rest].mean():
            best[rest] = values
    return best


def effects(rows: Sequence[Row], names: Sequence[str], figure: str) -> list[dict[str, Any]]:
    """Every level of every factor against the factor's base level, or where no pair of cells has both, against
    the first other one that has; for each model size: what a level is worth for one says little of another.

    `equal_batch` compares cells equal in every other factor, the batch too; `best_batch` the best batch of each
    side, but not of memory, whose ratios are plain, without an interval. `together`: factors that change with this
    one in all runs of the size, so that the effect is of all of them. `names`: of `matched_factors`.
    """
    plain = figure.endswith("_gib")
    noise = Noise(0.0, 0) if plain else pooled_noise(cells(rows, names, figure))
    table = []
    for (size,), of_size in grouped(rows, ["size"]).items():
        # Backend and degree of tensor parallelism may go together in one size only.
        followers = together(of_size, names)
        own = [name for name in names if name not in sum(followers.values(), [])]
        found = cells(of_size, own, figure)
        best = {} if plain else _best_cells(found, own)
        for factor in [name for name in own if name not in NOT_COMPARED]:
            first = base_level(of_size, factor)
            bases = [first]
            for level in [each for each in levels(of_size, factor) if each != first]:
                for base in bases:
                    row = {"size": size, "factor": factor, "level": level, "base": base}
                    row["together"] = followers.get(factor, [])
                    row["equal_batch"] = _estimate(_pairs(found, own, factor, base, level), noise)
                    row["best_batch"] = _estimate(_pairs(best, own, factor, base, level), noise)
                    if row["equal_batch"]["pairs"] or row["best_batch"]["pairs"]:
                        break
                table.append(row)
                bases.append(level)
    return table
