"""Ends commands that do many jobs by SIGKILL at random moments, and compares what they make.

    python benchmarks/kill_jobs.py                       # prepare, collect, export and grids, 20 kills of each
    python benchmarks/kill_jobs.py --ray                 # the same on a local Ray cluster of two nodes
    python benchmarks/kill_jobs.py --kills 3 --commands collect

A worker is killed, after which the command goes on, the command alone, or all of its processes, at a moment of the time
that the unbroken command took. The same command is started again until it ends by itself; then it must have made the
bytes of the unbroken one. Rounds go on until so many kills have struck.

The worker of a grid is a run, which has then failed: the grid is started again with --retry failed, and the states,
settings and losses of its runs are compared, since their times differ. On Ray each node has a task that runs the grid.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from titan_tts.launch.supervisor import descendants, kill_tree  # noqa: E402
from tools.harness.stand_in_analyzer import write_recordings  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

CORPUS = str(ROOT / "assets/spoken_digits/spoken_digits.tar")
PREPARE = "--chunk-items 8 --samples-per-shard 8 --where speaker=slt".split()
COLLECT = "--analyzer tools.harness.stand_in_analyzer:stand_in:100".split()
MADE = {
    "prepare": ["*/*.tar"],
    "collect": ["files/**/*.*", "collection.jsonl"],
    "export": ["*.tar"],
}
GRID = """
[grid]
name = "{name}"
config = "debug"
dump_folder = "{folder}"
steps = 2
counted_steps = 1
[settings]
data.max_frames = 32
data.num_workers = 0
[axes]
attention = ["sdpa", "matmul"]
"""
ON_EACH_NODE = """
import sys, ray
from titan_tts.overlay import call_in_overlay
ray.init(log_to_driver=False, logging_level="ERROR")
grid = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(call_in_overlay)
sys.exit(max(ray.get([grid.remote("titan_tts.cli:main", sys.argv[1:]) for _ in range(2)])))
"""


def arguments(command: str, folder: Path, output: Path, engine: str) -> list[str]:
    """Arguments of titan-tts that make `output`."""
    many = ["--workers", "2", "--engine", engine]
    if command == "prepare":
        return ["prepare", CORPUS, str(output), *PREPARE, *many]
    if command == "collect":
        return ["collect", str(folder / "recordings"), str(output), *COLLECT, *many]
    if command == "export":
        data = str(folder / "data")
        return ["data", "export", data, str(output), "--to", "audio-tars", *many]
    file = output.with_suffix(".toml")
    file.write_text(GRID.format(name=output.name, folder=output.parent))
    return ["ablate", str(file), "--no-analysis", "--retry", "failed"]


def made(command: str, output: Path) -> dict[str, str]:
    """The part of it that must be the same."""
    if command == "grids":
        records = (json.loads(path.read_text()) for path in output.glob("*/run.json"))
        return {each["name"]: f"{each['state']} {each['identity']}" for each in records} | {
            path.parent.name + " loss": repr(json.loads(path.read_text())["loss"])
            for path in output.glob("*/benchmark.json")
        }
    found = {path for pattern in MADE[command] for path in output.glob(pattern)}
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


def start(given: list[str], log: Path, program: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", program or "import titan_tts; titan_tts.main()", *given]
    with open(log, "a") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)


def workers() -> list[int]:
    """Processes that do jobs: a command's own, runs of a grid, and Ray's actors and tasks."""
    found = []
    for each in descendants(os.getpid()):
        with suppress(OSError):
            line = Path(f"/proc/{each}/cmdline").read_bytes()
            if re.search(rb"^ray::(Actor|call_in)|spawn_main|titan_tts\0train", line):
                found.append(each)
    return found


def kill_until_it_ends(
    begin: Callable[[], subprocess.Popen], most: float, rng: random.Random, is_grid: bool
):
    """Yields whom each kill has struck."""
    while True:
        process, whoms = begin(), ["command", "all", "worker", "worker"]
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, most))
                break
            whom = rng.choice(whoms)
            if whom != "worker":
                process.kill() if whom == "command" else kill_tree(process)
                process.wait()
            elif found := workers():
                os.kill(rng.choice(found), signal.SIGKILL)
                whoms.remove(whom)  # a job whose worker dies three times ends the command
            else:
                continue
            yield whom
        if process.poll() == 0:
            return
        failed = is_grid and process.poll() == 1 and len(whoms) < 4
        assert failed or process.poll() == -signal.SIGKILL, process.poll()
        while is_grid and workers():  # else the next command leaves their runs to those that end
            time.sleep(0.1)


def measure(command: str, folder: Path, engine: str, kills: int) -> dict[str, Any]:
    def begin(output: Path) -> subprocess.Popen:
        program = ON_EACH_NODE if command == "grids" and engine == "ray" else ""
        return start(
            arguments(command, folder, output, engine), output.with_suffix(".log"), program
        )

    began, whole = time.monotonic(), folder / f"{command}_whole"
    assert begin(whole).wait() == 0, whole.with_suffix(".log").read_text()[-4000:]
    most, expected = time.monotonic() - began, made(command, whole)
    struck, rounds, equal = list[str](), 0, 0
    while len(struck) < kills:
        output = folder / f"{command}{rounds}"
        try:
            rng, is_grid = random.Random(rounds), command == "grids"
            struck += kill_until_it_ends(lambda: begin(output), most, rng, is_grid)
        except AssertionError:
            sys.exit(output.with_suffix(".log").read_text()[-4000:])
        rounds, equal = rounds + 1, equal + (made(command, output) == expected)
        shutil.rmtree(output)
        print(f"{command}: {len(struck)} kills, {equal} of {rounds} rounds the same", flush=True)
    return {"rounds": rounds, "same": equal, "compared": len(expected), "kills": Counter(struck)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="of each command, at least")
    parser.add_argument("--commands", nargs="+", default=["prepare", "collect", "export", "grids"])
    parser.add_argument("--ray", action="store_true", help="on a local Ray cluster of two nodes")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/kill_jobs.json"))
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        if options.ray:
            os.environ["RAY_worker_niceness"] = "0"  # else whatever else runs here starves them
            from ray.cluster_utils import Cluster

            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
            stack.callback(cluster.shutdown)
            cluster.add_node(num_cpus=1)
            os.environ["RAY_ADDRESS"] = cluster.address
        folder, engine = Path(temporary), "ray" if options.ray else "local"
        write_recordings(folder / "recordings", 40)
        given = ["prepare", CORPUS, str(folder / "data"), *PREPARE]
        assert start(given, folder / "data.log").wait() == 0
        for name in options.commands:
            report[name] = measure(name, folder, engine, options.kills)
    good = all(each["same"] == each["rounds"] for each in report.values())
    report |= {"engine": engine, "conditions": environment()}
    write_atomic(options.output, json.dumps(report, indent=2) + "\n")
    print(f"{'passed' if good else 'FAILED'}: {options.output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
