"""What a step costs on a CPU before and after a save, a validation, samples and a resume.

    python benchmarks/after_a_save.py

Prepares the embedded corpus and trains the debug flavor, with the threads that the main job takes: 40 steps up to
a save, 40 after it, 40 after a validation, 40 after samples, and 40 in a second process that resumes. Seconds are
metrics.jsonl's; voluntary context switches are those of all threads that the process has had, read when a step's
line appears. Each part leaves its first five steps out. libgomp throttles how it waits, for ever, once more threads than
CPUs have opened a team: that is what a slower part would show.

Writes benchmarks/results/after_a_save.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.startup import spread  # noqa: E402
from torchtitan.models.dit_tts.files import JsonLines, write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

_CORPUS = "assets/spoken_digits/spoken_digits.tar"
_TITAN = [sys.executable, "-m", "titan_tts"]
_PART = 40
_PARTS = ("before", "after a save", "after a validation", "after samples", "after a resume")
_SETTLING = 5


def context_switches(process: int, counts: dict[str, int]) -> int:
    """Voluntary ones of all threads that the process has had.

    Args:
        counts: thread -> its last count, brought up to date: a thread that ends keeps it.
    """
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:  # the thread has ended
            continue
        voluntary = next(each for each in lines if each.startswith("voluntary"))
        counts[status.parent.name] = int(voluntary.split()[1])
    return sum(counts.values())


def train(folder: Path, steps: int) -> dict[int, int]:
    """Context switches up to each step of one process."""
    schedule = (
        f"--checkpoint.interval={_PART} --validation.freq={2 * _PART} --samples.freq={3 * _PART}"
    )
    options = f"{schedule} --samples.count=2 --metrics.log_freq=1 --training.steps={steps}".split()
    place = [
        f"--data.path={folder}/data/train",
        f"--job.dump_folder={folder}",
        "--job.experiment=run",
    ]
    cores = os.cpu_count() or 1
    # As scripts/main_job.sh has them.
    variables = {
        "OMP_NUM_THREADS": str(min(cores, 8)),
        "OMP_WAIT_POLICY": "active",
        "GOMP_SPINCOUNT": "3000",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, "train.py", "--job.config_file=train_configs/debug.toml"]
    process = subprocess.Popen(
        [*command, *options, *place],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    lines, found, size = JsonLines(folder / "run/metrics.jsonl"), {}, -1
    counts: dict[str, int] = {}
    while process.poll() is None:
        now = lines.path.stat().st_size if lines.path.exists() else -1
        if now != size:
            size = now
            rows = lines.read()
            if rows:
                found.setdefault(rows[-1]["step"], context_switches(process.pid, counts))
        time.sleep(0.005)
    if process.returncode:
        assert process.stderr is not None
        raise RuntimeError(process.stderr.read().decode()[-2000:])
    return found


def measure(folder: Path) -> dict[str, Any]:
    prepare = [
        *_TITAN,
        "prepare",
        _CORPUS,
        str(folder / "data"),
        "--loudness=off",
        "--max-silence=off",
    ]
    subprocess.run(prepare, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    switches = train(folder, 4 * _PART) | train(folder, 5 * _PART)
    seconds = {
        row["step"]: row["seconds_per_step"]
        for row in JsonLines(folder / "run/metrics.jsonl").read()
    }
    found = {}
    for number, name in enumerate(_PARTS):
        steps = range(number * _PART + 1 + _SETTLING, (number + 1) * _PART + 1)
        each = [switches[s] - switches[s - 1] for s in steps if {s, s - 1} <= switches.keys()]
        found[name] = {
            "ms_per_step": spread([1000 * seconds[step] for step in steps]),
            "context_switches_per_step": spread([float(count) for count in each]),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/after_a_save.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = measure(Path(folder))
    report = {"parts": parts, "conditions": environment()}
    write_atomic(Path(options.output), json.dumps(report, indent=1) + "\n")
    for name, row in parts.items():
        ms, switches = row["ms_per_step"], row["context_switches_per_step"]
        print(
            f"{name:20} {ms['median']:7.1f} ms a step ({ms['min']:.1f} to {ms['max']:.1f}), "
            f"{switches['median']:.0f} voluntary context switches"
        )
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
