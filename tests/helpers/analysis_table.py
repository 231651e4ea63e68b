"""The tables of an analysis, against the runs' own files."""

import csv
import json
import re
from pathlib import Path

from torchtitan.models.dit_tts.run.factors import FACTORS

_PARTS = ("data", "forward", "backward", "optimizer", "other", "exchange")
_PLAIN = (
    "samples_per_second audio_seconds_per_second mfu goodput_mfu hfu tflops_per_device "
    "peak_allocated_gib peak_reserved_gib loss"
).split()


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
            assert row["samples_per_second"] == row["source"] == ""
            continue
        result = json.loads(report.read_text())
        expected = {name: result[name] for name in _PLAIN} | {
            "seconds_per_step": result["seconds_per_step"]["median"],
            **{f"{part}_seconds": result["step_split"][part] for part in _PARTS},
        }
        for name, value in expected.items():
            assert row[name] == "" if value is None else float(row[name]) == value, (path, name)
        for name, value in result["factors"].items():
            assert row[name] == str(value)
        measured += 1
    return measured


_SHOWN = {
    "samples/s": ("samples_per_second", 1),
    "seconds of audio per second": ("audio_seconds_per_second", 1),
    "MFU %": ("mfu", 100),
    "goodput MFU %": ("goodput_mfu", 100),
    "HFU %": ("hfu", 100),
    "TFLOP/s per device": ("tflops_per_device", 1),
    "allocated GiB": ("peak_allocated_gib", 1),
    "reserved GiB": ("peak_reserved_gib", 1),
    "loss": ("loss", 1),
}
"""Columns of the page -> (key of benchmark.json, factor)"""

_OTHERS = {"name", "state", "repeat", "reason", "source", "s/step", *FACTORS, "device"}


def check_page(dom: str, folder: Path) -> int:
    """Every figure of the page's table of runs is that of the run's benchmark.json, to four digits.

    Args:
        dom: the page's HTML after its scripts.

    Returns:
        Number of figures compared.
    """
    table = dom[dom.index('id="runs"') :]
    head, *rows = table[: table.index("</table>")].split("<tr>")[1:]
    columns = re.findall(r"<th.*?>(.*?)</th>", head, re.S)
    figures = [name for name in columns if name not in _OTHERS and "." not in name]
    assert set(figures) <= set(_SHOWN) and {"samples/s", "loss"} <= set(figures)
    reports = {path.parent.name: path for path in folder.rglob("benchmark.json")}
    compared = 0
    for row in rows:
        cells = dict(zip(columns, re.findall(r"<td.*?>(.*?)</td>", row, re.S), strict=True))
        if cells["name"] not in reports:
            assert all(cells[name] == "-" for name in figures)
            continue
        report = json.loads(reports[cells["name"]].read_text() or "{}")
        seconds = report["seconds_per_step"]["median"]
        values = {name: (report[key], factor) for name, (key, factor) in _SHOWN.items()}
        for name, (value, factor) in (values | {"s/step": (seconds, 1)}).items():
            if name not in columns or value is None:
                continue
            shown, value = float(cells[name].replace(",", "")), value * factor
            assert abs(shown - value) <= max(5.1e-4 * abs(value), 0.5 * (abs(value) >= 1000)), name
            compared += 1
    return compared
