"""Best configurations, their scaling, and growth with the batch. `names`: the factors that vary."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_tts.grids.effects import NO_ALTERNATIVES, Row, grouped

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
