"""Best configurations, their scaling, and checks of the figures. `names`: the factors that vary."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_tts.grids.effects import LEVEL, NO_ALTERNATIVES, Row, cells_of, grouped, pooled_noise
from titan_tts.grids.runs import Run

WITHOUT_REPEATS = 0.02
"""A fall by at most this fraction passes where no repeats show the noise."""
_LEAST_FALL = 0.005
"""A fall by less is of no interest, however little the repeats differ."""

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
    """Whether samples/s, and with them MFU, fall from one batch to the next larger one of the same configuration.

    A fall counts if the difference of cell means of the logarithm is below the noise, so that with 95 % none of all
    `pairs` counts where nothing changes (Bonferroni), and below _LEAST_FALL; without repeats below WITHOUT_REPEATS.
    `tolerance`: the largest limit.
    """
    cells = cells_of(rows, names, SPEED)
    noise = pooled_noise(cells)
    lines: dict[tuple, list] = defaultdict(list)
    for key, values in cells.items() if "batch" in names else ():
        levels = dict(zip(names, key, strict=True))
        batch = levels.pop("batch")
        lines[tuple(levels.items())].append((batch, values))  # in the order of the batches
    steps = [(key, *pair) for key, line in lines.items() for pair in zip(line, line[1:])]
    falls, largest = [], 0.0
    for configuration, (batch, before), (next_batch, after) in steps:
        inverse = 1 / len(before) + 1 / len(after)
        half = noise.half_width(inverse, tail=(1 - LEVEL) / len(steps))
        tolerance = WITHOUT_REPEATS if half is None else max(_LEAST_FALL, -math.expm1(-half))
        largest = max(largest, tolerance)
        ratio = math.exp(after.mean() - before.mean())
        if ratio < 1 - tolerance:
            row = {"configuration": dict(configuration), "batch": batch}
            falls.append({**row, "next_batch": next_batch, "ratio": ratio})
    verdict = "cannot tell" if not steps else "fail" if falls else "pass"
    return {"verdict": verdict, "pairs": len(steps), "tolerance": largest, "falls": falls}


def best(rows: Sequence[Row], names: Sequence[str], figures: Sequence[str]) -> list[dict[str, Any]]:
    """For each combination of NO_ALTERNATIVES the cell of the highest mean throughput."""
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


def forecasts(runs: Sequence[Run]) -> dict[str, Any]:
    """How often the prediction that a run fits was right, of runs that ended completed or oom; and of each figure the
    `ratios` of measured over predicted."""
    tried = [run for run in runs if run.state in ("completed", "oom") and "fits" in run.predicted]
    words = {True: "fits", False: "does not fit"}
    fits = Counter(f"predicted that it {words[r.predicted['fits']]}, {r.state}" for r in tried)
    ratios = {}
    for name in ("seconds_per_step", SPEED, "mfu", "gib"):
        figure = "peak_allocated_gib" if name == "gib" else name  # a plan knows no reserved bytes
        found = [
            run.figures[figure] / run.predicted[name]
            for run in runs
            if run.measured and run.predicted.get(name) and run.figures.get(figure)
        ]
        if found:
            spread = {"median": float(np.median(found)), "min": min(found), "max": max(found)}
            ratios[figure] = spread | {"runs": len(found)}
    right = sum(run.predicted["fits"] == (run.state == "completed") for run in tried)
    return {"tried": len(tried), "right": right, "fits": dict(fits), "ratios": ratios}
