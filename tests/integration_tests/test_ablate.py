"""A real grid: killed, continued, one run out of memory and one that fails; and its page."""

import json
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.helpers.analysis_table import check_table
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
batch = 4096

[[extra]]
"encoder.model" = "/nowhere/encoder"
"""


def start(*arguments: str, **variables: str) -> subprocess.Popen:
    words = [sys.executable, "-m", "titan_tts", *arguments]
    options = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1", **variables}}
    options |= {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    memory = 8 * 2**30  # as `ulimit -v` limits the runs, too
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (memory, memory))
    return subprocess.Popen(words, preexec_fn=limit, **options)


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
    page = (analysis / "index.html").read_text()
    assert all(name in page for name in runs)
