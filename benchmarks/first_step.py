"""How long a user waits for help, for a run's first line and for its first steps, as whole processes.

    OMP_NUM_THREADS=1 python benchmarks/first_step.py

Prepares the embedded corpus and starts each command round after round, the commands in turn. Seconds are from
the start of the process to its line; `cpu` is the time of all its processes up to the end, user and system,
which other work on the machine changes less. A compiled run begins with an empty cache folder (cold) or with
what the cold one has left (warm).

Writes benchmarks/results/first_step.json.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.startup import spread  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

_CORPUS = "assets/spoken_digits/spoken_digits.tar"
_TITAN = [sys.executable, "-m", "titan_tts"]
_STEP = re.compile(r"step: *([13])/")


def run(command: list[str], variables: dict[str, str]) -> dict[str, float]:
    """Seconds to the first line of output, to steps 1 and 3, to the end, and of the CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    seconds: dict[str, float] = {}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        now = time.perf_counter() - began
        lines.append(line)
        seconds.setdefault("first_line", now)
        if step := _STEP.search(line):
            seconds[f"step_{step[1]}"] = now
    status = process.wait()
    if status:
        raise RuntimeError(f"status {status} of {' '.join(command)}:\n{''.join(lines[-20:])}")
    seconds["end"] = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds


def measure(folder: Path, rounds: int, cold_rounds: int) -> dict[str, Any]:
    """The spread of each command's seconds."""
    subprocess.run(
        [*_TITAN, "prepare", _CORPUS, str(folder / "data"), "--loudness=off", "--max-silence=off"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    runs, cache = folder / "runs", folder / "cache"
    options = f"--data.path={folder}/data/train --job.dump_folder={runs} --training.steps=3".split()
    options += "--metrics.log_freq=1 --validation.no-enable --checkpoint.no-enable".split()
    compiled = [*options, "--compile.enable", f"--compile.cache_folder={cache}"]
    script = "scripts/train_tts.sh"
    commands: dict[str, tuple[list[str], int]] = {
        "titan-tts --help": ([*_TITAN, "--help"], 1),
        "titan-tts train --help": ([*_TITAN, "train", "--help"], 1),
        "python train.py --help": ([sys.executable, "train.py", "--help"], 1),
        "titan-tts train debug": ([*_TITAN, "train", "debug", *options], 1),
        script: ([script, *options], 1),
        f"NGPU=2 {script}": ([script, *options], 2),
        "compiled, cold": ([script, *compiled], 1),
        "compiled, warm": ([script, *compiled], 1),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, (command, processes) in commands.items():
            cold = name == "compiled, cold"
            if cold and number >= cold_rounds:
                continue
            shutil.rmtree(runs, ignore_errors=True)
            if cold:
                shutil.rmtree(cache, ignore_errors=True)
            variables = {"NGPU": str(processes), "PYTHON": sys.executable}
            found[name].append(run(command, variables))
            print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return {
        name: {"rounds": len(rows), **{key: spread([row[key] for row in rows]) for key in rows[0]}}
        for name, rows in found.items()
    }


def show(commands: dict[str, Any]) -> None:
    def cell(values: dict[str, float] | None) -> str:
        if values is None:
            return ""
        return f"{values['median']:.1f} ({values['min']:.1f}-{values['max']:.1f})"

    columns = ("first_line", "step_1", "step_3", "cpu")
    print("| command | first line, s | first step, s | third step, s | CPU to the end, s |")
    print("|---|---|---|---|---|")
    for name, row in commands.items():
        print(f"| {name} | {' | '.join(cell(row.get(column)) for column in columns)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-rounds", type=int, default=2, help="minutes each")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/first_step.json"))
    options = parser.parse_args()
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        commands = measure(Path(folder), options.rounds, options.cold_rounds)
    report = {
        "commands": commands,
        "seconds": time.monotonic() - began,
        "conditions": environment(),
    }
    write_atomic(Path(options.output), json.dumps(report, indent=1) + "\n")
    show(commands)
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
