"""The tables of an analysis, against the runs' own files."""

import csv
import json
from pathlib import Path

_PARTS = ("data", "forward", "backward", "optimizer", "other")
_FIGURES = ("samples_per_second", "audio_seconds_per_second", "mfu", "goodput_mfu", "hfu", "loss")
_FIGURES += ("tflops_per_device", "peak_tflops", "peak_allocated_gib", "peak_reserved_gib")


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
        expected = {name: result[name] for name in _FIGURES} | {
            "seconds_per_step": result["seconds_per_step"]["median"],
            **{f"{part}_seconds": result["step_split"][part] for part in _PARTS},
        }
        for name, value in expected.items():
            assert row[name] == "" if value is None else float(row[name]) == value, (path, name)
        for name, value in result["factors"].items():
            assert row[name] == str(value)
        measured += 1
    return measured
