"""Ends commands that do many jobs by SIGKILL at random moments, and compares what they make.

    python benchmarks/kill_jobs.py                       # prepare, collect, export and grids, 20 kills each
    python benchmarks/kill_jobs.py --ray                 # prepare, collect and export on a local Ray cluster of two nodes
    python benchmarks/kill_jobs.py --kills 3 --commands collect

Each kill is of a worker, after which the command goes on, of the command alone, or of all its processes. It strikes at
a moment of the time that the unbroken command took, and the same command is started again until it ends by itself.
What it made must have the bytes of the unbroken one; of a grid each run must have ended in the same state, as its
figures are times. A round ends with a complete output; rounds go on until so many kills have struck. Writes
benchmarks/results/kill_jobs.json.
"""

import argparse
import hashlib
import json
import os
import random
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from titan_tts.launch.supervisor import descendants, kill_tree  # noqa: E402
from tools.harness.stand_in_analyzer import write_recordings  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

CORPUS = ROOT / "assets/spoken_digits/spoken_digits.tar"
PREPARE = ["--chunk-items", "8", "--samples-per-shard", "8", "--where", "speaker=slt"]
COLLECT = ["--analyzer", "tools.harness.stand_in_analyzer:stand_in:100", "--attempts", "1000"]
GRID = """[grid]
name = "{name}"
config = "debug"
dump_folder = "{folder}"
steps = 2
counted_steps = 1
[settings]
data.max_frames = 32
data.num_workers = 0
[axes]
batch = [1, 2, 3]
"""


class Command(NamedTuple):
    """`arguments(output)` of titan-tts, which make `output`, and {name: what must be the same} of it."""

    arguments: Callable[[Path], list[str]]
    made: Callable[[Path], dict[str, str]]


def hashes(*patterns: str) -> Callable[[Path], dict[str, str]]:
    def made(output: Path) -> dict[str, str]:
        found = [path for pattern in patterns for path in output.glob(pattern) if path.is_file()]
        names = (str(path.relative_to(output)) for path in found)
        digests = (hashlib.sha256(path.read_bytes()).hexdigest() for path in found)
        return dict(zip(names, digests, strict=True))

    return made


def states(output: Path) -> dict[str, str]:
    records = [json.loads(path.read_text()) for path in output.glob("*/run.json")]
    return {record["name"]: record["state"] for record in records}


def grid(output: Path) -> list[str]:
    file = output.with_suffix(".toml")
    file.write_text(GRID.format(name=output.name, folder=output.parent))
    return ["ablate", str(file), "--no-analysis"]


def commands(folder: Path, engine: str) -> dict[str, Command]:
    write_recordings(folder / "recordings", 40)
    many = ["--workers", "2", "--engine", engine]
    data, recordings = str(folder / "data"), str(folder / "recordings")
    return {
        "prepare": Command(
            lambda out: ["prepare", str(CORPUS), str(out), *PREPARE, *many], hashes("*/*.tar")
        ),
        "collect": Command(
            lambda out: ["collect", recordings, str(out), *COLLECT, *many],
            hashes("files/**/*", "collection.jsonl"),
        ),
        "export": Command(
            lambda out: ["data", "export", data, str(out), "--to", "audio-tars", *many],
            hashes("*.tar"),
        ),
        "grids": Command(grid, states),
    }


def start(arguments: list[str], log: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", "import titan_tts; titan_tts.main()", *arguments]
    with open(log, "a") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)


def workers(process: int) -> list[int]:
    """Processes that do jobs: children of the command, or Ray's."""
    found = []
    for each in [*descendants(process)[1:], *map(int, filter(str.isdigit, os.listdir("/proc")))]:
        with suppress(OSError):
            line = Path(f"/proc/{each}/cmdline").read_bytes()
            if line.startswith(b"ray::Actor") or (
                b"spawn_main" in line and each in descendants(process)
            ):
                found.append(each)
    return found


def round_of_kills(command: Command, output: Path, seconds: float, rng: random.Random) -> list[str]:
    """Starts the command and kills it until it ends; whom each kill has struck."""
    log, struck = output.with_suffix(".log"), list[str]()
    while True:
        process = start(command.arguments(output), log)
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, seconds))
                break
            whom = rng.choice(("worker", "command", "all"))
            if whom == "worker":
                if found := workers(process.pid):
                    os.kill(rng.choice(found), signal.SIGKILL)
                    struck.append(whom)
                continue
            if whom == "command":
                process.kill()
            kill_tree(process) if whom == "all" else process.wait()
            struck.append(whom)
        if process.poll() == 0:
            return struck
        assert process.poll() == -signal.SIGKILL, f"{process.poll()}:\n{log.read_text()[-4000:]}"


def measure(command: Command, folder: Path, kills: int) -> dict[str, Any]:
    began = time.monotonic()
    status = start(command.arguments(folder / "whole"), folder / "whole.log").wait()
    assert status == 0, (folder / "whole.log").read_text()[-4000:]
    seconds, expected = time.monotonic() - began, command.made(folder / "whole")
    struck, rounds, equal = list[str](), 0, 0
    while len(struck) < kills:
        output = folder / f"round{rounds}"
        struck += round_of_kills(command, output, seconds, random.Random(rounds))
        rounds, equal = rounds + 1, equal + (command.made(output) == expected)
        shutil.rmtree(output)
        print(f"  {len(struck)} of {kills} kills, {equal} of {rounds} rounds the same", flush=True)
    return {
        "rounds": rounds,
        "rounds_with_the_same_result": equal,
        "compared": len(expected),
        "kills": Counter(struck),
        "seconds_unbroken": seconds,
    }


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
            from ray.cluster_utils import Cluster

            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
            stack.callback(cluster.shutdown)
            cluster.add_node(num_cpus=1)
            os.environ["RAY_ADDRESS"] = cluster.address
        known = commands(Path(temporary), "ray" if options.ray else "local")
        if "export" in options.commands:
            arguments = ["prepare", str(CORPUS), f"{temporary}/data", *PREPARE]
            assert start(arguments, Path(temporary, "data.log")).wait() == 0
        for name in options.commands:
            if name == "grids" and options.ray:
                continue  # a run has all GPUs of a machine
            print(name, flush=True)
            folder = Path(temporary, name)
            folder.mkdir()
            report[name] = measure(known[name], folder, options.kills)
    good = all(each["rounds_with_the_same_result"] == each["rounds"] for each in report.values())
    report |= {"engine": "ray" if options.ray else "local", "conditions": environment()}
    write_atomic(options.output, json.dumps(report, indent=2) + "\n")
    print(f"{'passed' if good else 'FAILED'}: {options.output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
