"""The whole benchmark in small: a recipe of the package and the in-fill model train, speak and are compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _call(folder, *options):
    command = [sys.executable, "benchmarks/time_to_quality.py", "--noise-seeds", "1"]
    command += ["--utterances", "2", "--sweep-budget", "2", "--budgets", "2", "--seeds", "0"]
    command += ["--factors", "1", "--jobs", "1", "--precision", "float32"]
    command += ["--data", str(folder / "data"), "--work", str(folder / "runs")]
    command += ["--out", str(folder / "results/found.json"), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.matrix  # a benchmark's script, and a minute
def test_recipes_train_speak_and_are_compared(tmp_path):
    status, said = _call(tmp_path, "--recipes", "irodori", "f5_joined")
    assert status == 0, said
    found = json.loads((tmp_path / "results/found.json").read_text())
    assert set(found["recipes"]) == {"irodori", "f5_joined"} and len(found["runs"]) == 2
    for run in found["runs"]:
        assert run["seconds"] > 0 and run["utterances"] == 2
        assert len(run["wer_by_noise_seed"]) == 1 and 0 < run["heldout_loss"] < 3
    assert (tmp_path / "results/found.png").is_file()
    assert "| `f5_joined` |" in said
    # Called again it trains nothing.
    status, said = _call(tmp_path, "--recipes", "irodori", "f5_joined")
    assert status == 0 and said.count("(kept)") == 2 and "[2/2]" in said, said
