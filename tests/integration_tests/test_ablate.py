"""A real grid: killed, continued, one run out of memory and one that fails; its page; and autotune."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.analysis_table import check_page, check_table
from tests.helpers.browser import dom_after_scripts
from titan_tts.grids.search import smaller
from titan_tts.launch.supervisor import kill_tree

ROOT = Path(__file__).resolve().parents[2]

GRID = """
[grid]
name = "mine"
config = "debug"
dump_folder = "{folder}"
steps = 4
counted_steps = 2
timeout_minutes = 5.0

[settings]
data.max_frames = 32
data.num_workers = 0

[axes]
gpus = [1, 2]
batch = [1, 2]

[[exclude]]
batch = 2

[[extra]]
memory_gib = 3.0
batch = 4096

[[extra]]
"encoder.model" = "/nowhere/encoder"
"""


def start(*arguments: str, **variables: str) -> subprocess.Popen:
    words = [sys.executable, "-m", "titan_tts", *arguments]
    options = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1", **variables}}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, text=True, start_new_session=True, **options)


def test_a_grid_killed_and_continued(tmp_path):
    file, folder = tmp_path / "mine.toml", tmp_path / "mine"
    file.write_text(GRID.format(folder=tmp_path))
    first = start("ablate", str(file))  # whose second run has two ranks
    assert first.stdout is not None
    while "[1/4]" not in first.stdout.readline():
        assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)  # alone: its run must end by itself
    first.wait()
    records = {path.parent.name: path for path in folder.glob("*/run.json")}
    before = {
        name: path.read_bytes()
        for name, path in records.items()
        if json.loads(path.read_text())["state"] == "completed"
    }
    assert len(before) == 1
    second = start("ablate", str(file))
    try:
        printed, _ = second.communicate(timeout=400)
    finally:
        kill_tree(second)
    assert second.returncode == 1  # one run has failed
    assert "4 runs, of which 1 are done" in printed and "2 completed, 1 failed, 1 oom" in printed
    assert {name: (folder / name / "run.json").read_bytes() for name in before} == before
    runs = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/run.json")}
    states = {run["state"]: run for run in runs.values()}
    oom = states["oom"]
    assert "memory" in oom["reason"].lower() and oom["factors"]["batch"] == 4096
    assert "/nowhere/encoder" in states["failed"]["reason"]
    for name, run in runs.items():
        if run["state"] == "completed":
            report = json.loads((folder / name / "benchmark.json").read_text())
            assert report["factors"] == {key: run["factors"][key] for key in report["factors"]}
            assert (report["steps"], report["warm_up_steps"]) == (2, 2)
    analysis = folder / "analysis"
    assert check_table(analysis, folder) == 2
    dom = dom_after_scripts(analysis / "index.html", tmp_path / "profile")
    assert check_page(dom, analysis) >= 2 * 6
    assert all(name in dom for name in runs)


LIMITS = """
import os, resource
limit = {"0": 3.1, "1": 2.9}.get(os.environ.get("LOCAL_RANK", ""))
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (int(limit * 2**30),) * 2)
"""


@pytest.mark.matrix
def test_autotune_with_one_rank_tighter_than_the_other(tmp_path):
    """What a linear search finds, and a run that takes the sizes together."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(LIMITS)  # each rank's own limit, at its start
    out, work = tmp_path / "found.toml", tmp_path / "work"
    frames = [384]
    options = ["autotune", "debug", "--nproc", "2", "--buckets", *map(str, frames)]
    options += ["--work", str(work), "--out", str(out), "--data.max_frames", "384"]
    options += ["--training.global_batch_size", "512", "--data.batch_multiple", "2"]
    tune = start(*options, "--data.num_workers", "0", PYTHONPATH=f"{site}:{ROOT}")
    try:
        printed, _ = tune.communicate(timeout=560)
    finally:
        kill_tree(tune)
    assert tune.returncode == 0, printed
    tried: dict[int, dict[int, set[str]]] = {}
    for path in work.glob("trials/own/frames*/bs*/run.json"):
        edge = int(path.parents[1].name.removeprefix("frames"))
        run = json.loads(path.read_text())
        states = tried.setdefault(edge, {}).setdefault(run["factors"]["batch"], set())
        states.add(run["state"])
    assert set(tried) == set(frames)
    text = out.read_text()
    [alone] = map(int, re.findall(r"^# .*: micro-batch (\d+),", text, re.MULTILINE))
    [sizes] = re.findall(
        rf"^# largest .* of {re.escape(str(frames))} frames: (.*)$", text, re.MULTILINE
    )
    [together] = json.loads(sizes)
    for edge in frames:
        # A linear search from 1 ends at the first that does not fit; after one that fits for some steps
        # only, the next to be tried is a sixteenth smaller.
        too_large = min(n for n, states in tried[edge].items() if "oom" in states)
        assert tried[edge][alone] == {"completed"} and alone in (too_large - 1, smaller(too_large))
        for n, states in tried[edge].items():
            assert states == {"completed"} if n < too_large else "oom" in states
        assert 0 < together <= alone
    checks = work.glob("trials/all_buckets/*/run.json")
    assert "completed" in {json.loads(path.read_text())["state"] for path in checks}
    keys = tomllib.loads(text)
    blocks = keys["data"]["batch_multiple"]
    assert keys["data"]["bucket_frames"] == frames
    micro_batch = keys["training"]["local_batch_size"]
    assert keys["data"]["bucket_batch_sizes"] == [micro_batch * blocks]
    assert micro_batch <= together
    assert keys["training"]["global_batch_size"] >= 12


SRUN = """#!/usr/bin/env bash
# Starts the command twice, as for two nodes.
while [[ $1 == -* ]]; do shift 2; done
"$@" & "$@"; status=$?; wait; exit $status
"""


@pytest.mark.matrix
def test_the_runs_of_a_table_in_a_job_of_two_nodes(tmp_path):
    """One on the first node; one by two launchers that meet, on one machine; and one that needs four."""
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    text = GRID.partition("[[exclude]]")[0].format(folder=tmp_path)
    text = text.replace("gpus = [1, 2]\nbatch = [1, 2]", "gpus = [1, 2, 4]\nbatch = [1]")
    (tmp_path / "mine.toml").write_text(text.replace("[grid]", "[grid]\ngpus_per_node = 1"))
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2"}
    grid = start("ablate", str(tmp_path / "mine.toml"), **variables)
    try:
        printed, _ = grid.communicate(timeout=400)
    finally:
        kill_tree(grid)
    assert grid.returncode == 0, printed
    assert "skipped: it needs 4 nodes; start the grid with --retry skipped" in printed
    summary = json.loads((tmp_path / "mine/analysis/summary.json").read_text())
    (curve,) = summary["scaling"]
    assert [(point["gpus"], point["nodes"]) for point in curve["points"]] == [(1, 1), (2, 2)]
    assert curve["configuration"] == {"layout": "fsdp"}
