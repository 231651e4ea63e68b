"""The whole analysis: tables that agree with the runs, plots, and a page that works offline."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.helpers.analysis_table import check_table, read_table
from tests.helpers.benchmark_runs import BASE, combinations, report, write_grid, write_run
from tests.helpers.pages import check_offline, table, tables
from titan_tts import cli
from titan_tts.grids.page import label
from titan_tts.grids.plots import _curves, _scaling

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "<script>alert(1)</script>"
LOST = ("oom", "failed", "timeout", "skipped")
CURVES = {f"{name}_over_batch" for name in ("samples_per_second", "mfu", "peak_reserved_gib")}


def analyze(folder, out):
    assert cli.main(["analyze", str(folder), "--out", str(out)]) == 0
    return out


def plots(out, kind="svg"):
    return {path.stem for path in (out / "plots").glob(f"*.{kind}")}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """24 cells of two repeats, and cells without results."""
    top = tmp_path_factory.mktemp("runs")
    cells = combinations(
        gpus=[4, 8], batch=[2, 4, 8], compile=["off", "default"], checkpointing=["none", "full"]
    )
    write_grid(top / "grid", cells, repeats=2, noise=0.01)
    for state in LOST:
        factors = BASE | {"batch": 16, "compile": "default" if state == "oom" else "off"}
        write_run(top / "grid" / state, factors=factors, state=state, reason=f"{SCRIPT} & {state}")
    write_run(top / "grid" / "empty").joinpath("benchmark.json").write_text("")
    dollar = BASE | {"batch": 2, "optimizer": f"$x_$ {SCRIPT}"}  # mathematics to matplotlib
    result = report(dollar, 50.0, peak_tflops=None, compiles_while_timed=2)
    write_run(top / "named", result, factors=dollar)
    return top


@pytest.mark.long
def test_the_tables_plots_and_page_of_a_grid(grid, tmp_path):
    """The page needs no network and escapes what runs say; the runs are sorted by samples/s, those without any last."""
    analysis = analyze(grid, tmp_path / "out")
    assert check_table(analysis, grid) == 49
    rows = read_table(analysis)
    assert len(rows) == 48 + 4 + 2
    (empty,) = [row for row in rows if row["state"] == "unreadable"]
    assert empty["folder"].endswith("empty")
    found = json.loads((analysis / "summary.json").read_text())
    assert found["states"] == {"completed": 49, **dict.fromkeys((*LOST, "unreadable"), 1)}
    speeds = {row["factor"]: row for row in found["effects"]["samples_per_second"]}
    assert speeds["checkpointing"]["base"] == "none" and speeds["compile"]["level"] == "default"
    assert found["deviation"][1] == 24 and found["growth"]["verdict"] == "pass"
    assert "rows" not in found and found["scaling"] and found["constant"]["size"] == "800M"
    assert plots(analysis) == plots(analysis, "png") == CURVES | {"scaling"}
    for path in (analysis / "plots").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    svg = (analysis / "plots" / "mfu_over_batch.svg").read_text()
    for text in ("out of memory", "failed", "timed out", "skipped", "MFU %", "4 GPUs"):
        assert text in svg
    page = (analysis / "index.html").read_text()
    check_offline(page)
    assert SCRIPT not in page and "&lt;script&gt;alert(1)" in page
    assert "1 run compiled while being timed" in page
    head, *listed = table(page, "state")
    measured = [row for row in rows if row["mfu"]]
    fastest = sorted(measured, key=lambda row: -float(row["samples_per_second"]))
    for name, unit, scale in (("samples_per_second", "samples/s", 1), ("mfu", "MFU %", 100)):
        cells = [row[head.index(unit)] for row in listed]
        values = [float(text.replace(",", "")) for text in cells[:49]]
        assert values == pytest.approx([scale * float(row[name]) for row in fastest], rel=6e-4)
        assert cells[49:] == ["-"] * 5
    assert page.count("<svg") == 4


def test_lines_of_the_plots():
    """Each curve's ideal is that of its own fewest GPUs; runs without results are marked in their own panel."""
    points = [
        [dict(gpus=n, mfu=mfu, efficiency=1.0) for n, mfu in ((1, high), (8, low))]
        for high, low in ((0.4, 0.2), (0.3, 0.1))
    ]
    curves = [
        {"configuration": {"size": "800M", "layout": layout}, "points": each}
        for layout, each in zip(("ddp", "fsdp"), points, strict=True)
    ]
    _scaling(figure := Figure(), curves, ["size", "layout"])
    drawn = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert drawn == [pytest.approx(ends) for ends in ([30, 10], [30, 30], [40, 20], [40, 40])]
    rows = [
        BASE | {"gpus": gpus, "batch": batch, "compile": compiled, "samples_per_second": speed}
        for gpus, batch, compiled, speed in (
            *((4, 1, "off", 3.0), (4, 2, "off", 5.0), (4, 1, "default", 6.0)),
            *((8, 1, "off", 9.0), (8, 2, "off", 7.0)),
        )
    ]
    lost = [
        BASE | {"gpus": 8, "batch": 4, "state": "oom", "device": None},
        BASE | {"gpus": 4, "batch": None, "state": "failed"},
        BASE | {"gpus": 4, "batch": 8, "state": "failed", "size": "8B", "device": None},
    ]
    everything = [*(row | {"state": "completed"} for row in rows), *lost]
    content = {"rows": rows, "all": everything, "names": ["gpus", "batch", "compile"]}
    content["constant"] = {"size": "800M", "device": "H200", "layout": "fsdp"}
    _curves(figure := Figure(), content, "samples_per_second")
    drawn = [
        [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines] for axes in figure.axes
    ]
    assert drawn == [[(1, 2, 3.0, 5.0), (1, 6.0)], [(1, 2, 9.0, 7.0), (4, 0)]]


@pytest.mark.long
def test_the_tables_as_people_read_them(tmp_path):
    """Effects, efficiency, MFU and its ideal."""
    for each in combinations(gpus=[4, 16], batch=[2, 4, 8], compile=["off", "default"]):
        name = f"{each['compile']}_{each['gpus']}_{each['batch']}"
        speed = {4: 200.0, 16: 640.0}[each["gpus"]]
        speed *= 1 if "off" in name else 1.5 if name == "default_16_4" else 1.2
        result = report(levels := each | {"nodes": each["gpus"] // 4}, speed)
        for repeat in (0, 1):
            folder = tmp_path / "grid" / f"{name}_{repeat}"
            write_run(folder, result, factors=levels, repeat=repeat)
    out = analyze(tmp_path / "grid", tmp_path / "out")
    page = (out / "index.html").read_text()
    best = "16 GPUs, 4 nodes, batch 4, compile default"
    assert [row[:3] for row in tables(page)[0][1:]] == [
        *(["4 GPUs, 1 node, batch 2, compile default", "2", "240"], [best, "2", "960"])
    ]
    assert "1 of 8 steps" in page
    assert "most by -20.0 %: 16 GPUs, 4 nodes, compile default, batch 4 to 8" in page
    rows = table(page, "efficiency")
    # MFU is throughput per GPU over 100: 2.00 x 1.2 = 60 % of the fastest on 4 GPUs.
    assert rows[1] == ["batch 4, compile default", "4", "1", "240", "100.0 %", "60", "60"]
    assert rows[4][1:] == ["16", "4", "768", "80.0 %", "48", "60"]
    rows = table(page, "at best batches")
    # Five pairs of 1.2 and one of 1.5.
    assert rows[1][:4] == ["800M", "compile", "default", "off"]
    assert rows[1][4:7] == ["+24.5 %", "+20.0 to +50.0 %", "6"]


def test_levels_as_people_read_them():
    levels = {"gpus": 1, "nodes": 2, "layout": "fsdp", "compile": "off", "batch": 4, "x": None}
    assert label(levels) == "1 GPU, 2 nodes, fsdp, compile off, batch 4, x not given"
    assert label({"backend": "torchtitan", "optimizer.lr": 0.1}) == "optimizer.lr 0.1"
    assert label({"backend": "torchtitan"}) == "torchtitan" and label({}) == "all runs"


@pytest.mark.long
def test_an_earlier_analysis_is_replaced_and_not_searched_and_another_page_is_kept(
    tmp_path, capsys
):
    out = tmp_path / "grid" / "analysis"
    write_grid(tmp_path / "grid", combinations(gpus=[4, 8]), repeats=1, noise=0)
    for _ in range(2):
        assert cli.main(["analyze", str(tmp_path / "grid")]) == 0
        assert len(read_table(out)) == 2 and plots(out) == {"scaling"}
    (out / "plots" / "mine.svg").write_text("kept")
    run = write_run(tmp_path / "one" / "a", report(BASE, 100.0))
    assert cli.main(["analyze", str(tmp_path / "grid"), str(run)]) == 0
    assert len(read_table(out)) == 3 and not (run / "analysis").exists()
    assert plots(analyze(run, out)) == {"mine"}
    (tmp_path / "index.html").write_text("mine")
    assert cli.main(["analyze", str(run), "--out", str(tmp_path)]) == 2
    assert "index.html is not a page of titan-tts analyze" in capsys.readouterr().err
    assert (tmp_path / "index.html").read_text() == "mine"


@pytest.mark.long
def test_runs_without_mfu_and_without_figures_by_the_script(tmp_path):
    """There are no curves of single points."""
    result = report(BASE, 100.0, mfu=None, goodput_mfu=None, hfu=None, peak_tflops=None)
    write_run(tmp_path / "cpu", result)
    write_run(tmp_path / "a", state="oom", reason="no memory")
    command = [sys.executable, "optimization_analysis.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    out = tmp_path / "analysis"
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\n2 runs (1 oom, 1 completed): {out / 'index.html'}\n")
    assert not plots(out)
    page = (out / "index.html").read_text()
    assert "<h1>Analysis of 2 runs</h1>" in page
    assert "no memory" in page
    alone = analyze(tmp_path / "a", tmp_path / "alone")
    assert [row["state"] for row in read_table(alone)] == ["oom"] and not plots(alone)
