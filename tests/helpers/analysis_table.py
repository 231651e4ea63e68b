"""The tables of an analysis, against the runs' own files."""

import csv
import json
import math
from pathlib import Path

from tests.helpers.pages import table

_PARTS = ("data", "forward", "backward", "optimizer", "other")
_HEADS = {
    "samples_per_second": "samples/s",
    "audio_seconds_per_second": "seconds of audio per second",
    "mfu": "MFU %",
    "goodput_mfu": "goodput MFU %",
    "hfu": "HFU %",
    "tflops_per_device": "TFLOP/s per device",
    "peak_tflops": "peak TFLOP/s",
    "peak_allocated_gib": "allocated GiB",
    "peak_reserved_gib": "reserved GiB",
    "loss": "loss",
}
"""Figure of benchmark.json -> head of its column on the page"""


def read_table(out: Path) -> list[dict[str, str]]:
    """The rows of summary.csv."""
    with open(out / "summary.csv", newline="") as file:
        return list(csv.DictReader(file))


def check_table(out: Path, folder: Path) -> int:
    """Every run below a folder is a row, and every figure of a row is that of its benchmark.json.

    Returns:
        Number of runs with figures.
    """
    rows = {row["folder"]: row for row in read_table(out)}
    records = sorted(folder.rglob("run.json"))
    assert set(rows) == {str(path.parent) for path in records}
    measured = 0
    for path in records:
        row, run = rows[str(path.parent)], json.loads(path.read_text())
        if row["state"] == "unreadable":
            continue
        keys = ("name", "state", "reason", "grid", "repeat")
        assert [row[key] for key in keys] == [str(run[key]) for key in keys]
        assert row["batch"] == str(run["factors"]["batch"])
        report = path.parent / "benchmark.json"
        if not report.exists():
            assert row["samples_per_second"] == ""
            continue
        result = json.loads(report.read_text())
        expected = {name: result[name] for name in _HEADS} | {
            "seconds_per_step": result["seconds_per_step"]["median"],
            **{f"{part}_seconds": result["step_split"][part] for part in _PARTS},
        }
        for name, value in expected.items():
            assert row[name] == "" if value is None else float(row[name]) == value, (path, name)
        for name, value in result["factors"].items():
            assert row[name] == str(value)
        measured += 1
    return measured


def check_page(dom: str, out: Path) -> int:
    """Every figure of the page's table of runs is summary.csv's, in percent where its head says so.

    Args:
        dom: the page's HTML after its scripts.

    Returns:
        Number of figures compared.
    """
    columns, *rows = table(dom, "state")
    expected, compared = {row["name"]: row for row in read_table(out)}, 0
    for row in rows:
        cells = dict(zip(columns, row, strict=True))
        values = expected.pop(cells["name"])
        for name, head in (_HEADS | {"seconds_per_step": "s/step"}).items():
            shown = cells.get(head, "-").replace(",", "")
            if not values[name]:
                assert shown == "-", (cells["name"], name)
            elif head in cells:
                value = float(values[name]) * (100 if head.endswith("%") else 1)
                assert math.isclose(float(shown), value, rel_tol=6e-4), (cells["name"], name)
                compared += 1
    assert not expected
    return compared
