"""The effect of each factor on throughput, with the uncertainty that repeats show.

All of it works on y = log(figure), so that effects are ratios. A *cell* is the runs equal in all factors. *Noise* is
the pooled variance within cells, s² = Σ (y - cell mean)² / df with df = Σ (n - 1). An *effect* is the mean of the
differences of P pairs of cell means, with the interval ± t(0.975, df) · s / P · √(Σ 1/n over their cells): about the
mean over just these pairs; `smallest` and `largest` show how far it differs between them.

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
NO_ALTERNATIVES = ("size", "device", "gpus", "nodes", "lengths", *DATA)
"""Runs that differ in these do not compete: the best is sought, and plots are drawn, for each."""

_NOT_COMPARED = ("batch", "gpus")
"""Growth with the batch and scaling over GPUs are tables of their own."""

_SIZES = ("debug", "18M", "60M", "300M", "800M", "3B", "8B")
_BASES: dict[str, tuple[str, ...]] = {
    "size": _SIZES,
    "backend": ("torchtitan",),
    "layout": ("ddp", "fsdp"),
    "checkpointing": ("none",),
    "compile": ("off",),
    "precision": ("bf16", "fp32"),
    "attention": ("sdpa", "auto"),
    "optimizer": ("AdamW",),
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
        """Half an interval's width, t · √(variance · inverse_counts) with probability `tail` above it; None without
        repeats."""
        if self.df == 0:
            return None
        quantile = float(stdtrit(self.df, 1 - tail))  # Student's t
        return max(_ROUNDING, quantile * math.sqrt(self.variance * inverse_counts))


def level_order(value: Any) -> tuple:
    """Sorts levels: what is not given, numbers, model sizes, texts."""
    if value in _SIZES:
        return True, False, _SIZES.index(value)
    return isinstance(value, str), value is not None, 0 if value is None else value


def _levels(rows: Iterable[Row], factor: str) -> list[Any]:
    """A factor's levels: first a neutral one, then the others in order."""
    found = sorted({row[factor] for row in rows}, key=level_order)
    base = next((level for level in _BASES.get(factor, ()) if level in found), found[0])
    return [base, *(level for level in found if level != base)]


def matched_factors(rows: Sequence[Row], factors: Sequence[str]) -> list[str]:
    """The factors on which two runs of a comparison must agree: those that vary, and of those that always change
    together the first."""
    varying = [name for name in factors if len({row[name] for row in rows}) > 1]
    followers = sum(together(rows, varying).values(), [])
    return [name for name in varying if name not in followers]


def together(rows: Sequence[Row], factors: Sequence[str]) -> dict[str, list[str]]:
    """Factor -> later ones whose levels are one-to-one with its own, such as an axis "compile.mode" of
    the factor `compile`: nothing can tell their effects apart. Batch, accumulation and NO_ALTERNATIVES are
    never among them: what goes with a batch or with shorter data must not pass for the effect of a factor."""
    apart = (*_NOT_COMPARED, *NO_ALTERNATIVES, "accumulation")
    found: dict[str, list[str]] = {}
    for first, second in combinations([name for name in factors if name not in apart], 2):
        pairs = {(row[first], row[second]) for row in rows}
        counts = {len({pair[side] for pair in pairs}) for side in (0, 1)} | {len(pairs)}
        known = sum(found.values(), [])
        if len(pairs) > 1 and len(counts) == 1 and not {first, second} & {*known}:
            found.setdefault(first, []).append(second)
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
    groups = grouped([row for row in rows if (row[figure] or 0) > 0], names)
    return {key: np.log([row[figure] for row in each]) for key, each in groups.items()}


def pooled_noise(found: Mapping[tuple, np.ndarray]) -> Noise:
    """The variance within cells."""
    df = sum(len(values) - 1 for values in found.values())
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in found.values())
    return Noise(squares / df if df else 0.0, df)


def _estimate(pairs: Sequence[Pair], noise: Noise) -> dict[str, Any]:
    """The effect over pairs as a ratio. `farthest`: the configuration whose pair differs most from the mean, by more
    than _OUTLIER; of two such pairs, the slower."""
    if not pairs:
        return dict.fromkeys(("ratio", "low", "high", "smallest", "largest")) | {"pairs": 0}
    changes = np.array([level.mean() - base.mean() for _, base, level in pairs])
    mean, inverse = changes.mean(), sum(1 / len(a) + 1 / len(b) for _, a, b in pairs)
    half = noise.half_width(inverse / len(pairs) ** 2)
    ratio, smallest, largest = (math.exp(each) for each in (mean, changes.min(), changes.max()))
    far = max(range(len(pairs)), key=lambda n: (round(abs(changes[n] - mean), 9), -changes[n]))
    named = {"configuration": pairs[far][0], "ratio": math.exp(changes[far])}
    return {
        "ratio": ratio,
        "low": None if half is None else ratio * math.exp(-half),
        "high": None if half is None else ratio * math.exp(half),
        "smallest": smallest,
        "largest": largest,
        "pairs": len(pairs),
        "farthest": named if abs(changes[far] - mean) > _OUTLIER else None,
    }


def _pairs(
    found: Mapping[tuple, np.ndarray], names: Sequence[str], factor: str, base: Any, level: Any
) -> list[Pair]:
    """Pairs of cells that are equal but for the factor."""
    pairs = []
    for key, cell in found.items():
        row = dict(zip(names, key, strict=True))
        other = found.get(key_of(row | {factor: level}, names))
        if row[factor] == base and other is not None:
            equal = {n: v for n, v in row.items() if n not in (factor, "size") and v is not None}
            pairs.append((equal, cell, other))
    return pairs


def _best_cells(found: Mapping[tuple, np.ndarray], names: Sequence[str]) -> dict[tuple, np.ndarray]:
    """The fastest batch of each combination of the other factors, with None for the batch in its key."""
    best: dict[tuple, np.ndarray] = {}
    for key, values in found.items():
        rest = tuple(None if n == "batch" else level for n, level in zip(names, key, strict=True))
        if rest not in best or values.mean() > best[rest].mean():
            best[rest] = values
    return best


def effects(rows: Sequence[Row], names: Sequence[str], figure: str) -> list[dict[str, Any]]:
    """Every level of every factor against the factor's base level, or where no pair of cells has both, against
    the first other one that has; for each model size: what a level is worth for one says little of another.

    `equal_batch` compares cells equal in every other factor, the batch too; `best_batch` the best batch of each
    side, but not of memory, whose ratios have no interval. `together`: factors that change with this one in all runs
    of the size, so that the effect is of all of them. `names`: of `matched_factors`.
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
        for factor in [name for name in own if name not in _NOT_COMPARED]:
            first, *others = _levels(of_size, factor)
            bases = [first]
            for level in others:
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
