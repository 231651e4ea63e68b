"""Ends `titan-tts prepare` at random moments, many times over, and compares the shards.

    python benchmarks/kill_prepare.py --runs 20
    python benchmarks/kill_prepare.py --runs 20 --ends SIGKILL SIGTERM SIGINT "full disk"

Each run prepares the embedded corpus and is ended once while it encodes, once while it writes shards
and once at any moment, by one of `--ends`: a signal to all its processes or to the parent alone, or a disk
that is filled (a tmpfs of limited size, which needs root), with 1 or 2 workers. It is then let through. Its shards must be those of a run that was never killed, byte for byte. Writes
benchmarks/results/kill_prepare.json.
"""

import argparse
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.harness.disks import full_disk, small_disk  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

DISK_MIB = 200
CORPUS = ROOT / "assets/spoken_digits/spoken_digits.tar"
# Many small chunks and shards: each stage lasts for seconds and has many moments to die in.
SETTINGS = ["--chunk-items", "8", "--samples-per-shard", "8", "--references", "2"]
STAGES = {"encode": "chunks/*.json", "shards": "*/*.tar"}
"""stage -> the files that it makes in the work folder"""


@dataclass
class Kill:
    """One end, and what lay in the work folder when it struck."""

    end: str
    aimed_at: str  # a stage, or "any" moment
    whom: str  # "group": every process at once; "parent": the workers find themselves alone
    workers: int
    chunks: int
    shards: int

    @property
    def stage(self) -> str:
        """Where it struck."""
        return "before" if not self.chunks else "shards" if self.shards else "encode"


def start_command(arguments: list[str], log: Path) -> subprocess.Popen:
    """Starts titan-tts in a process group of its own."""
    command = [sys.executable, "-c", "import titan_tts; titan_tts.main()", *arguments]
    with open(log, "a") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)


class Preparation:
    """Runs that prepare a corpus, the embedded one by default, into one output.

    Args:
        ends: to draw from.
        start: starts titan-tts with arguments and a log; the process has pid, poll() and
            wait(timeout), and a process group of its own.
        settings: options of `titan-tts prepare`.
    """

    def __init__(
        self,
        output: Path,
        ends: Sequence[str] = ("SIGKILL",),
        start: Callable[[list[str], Path], Any] = start_command,
        corpus: Path = CORPUS,
        settings: Sequence[str] = SETTINGS,
    ):
        self.output, self.ends, self._start = output, ends, start
        self._arguments = ["prepare", str(corpus), str(output), *settings]
        self.partial = output.with_name(output.name + ".partial")
        # Not on the disk that is filled.
        folder = output.parent.parent if "full disk" in ends else output.parent
        self.log = folder / f"{output.name}.log"

    def start(self, workers: int) -> Any:
        return self._start([*self._arguments, "--workers", str(workers)], self.log)

    def run(self, workers: int = 1) -> dict[str, bytes]:
        """Run from the start, or from where the last run died, to the end; every shard's bytes."""
        status = self.start(workers).wait(300)
        assert status == 0, f"exit status {status}:\n{self.log.read_text()[-4000:]}"
        assert not self.partial.exists()
        tars = sorted(self.output.glob("*/*.tar"))
        return {str(path.relative_to(self.output)): path.read_bytes() for path in tars}

    def kill_and_finish(self, aims: list[str], seed: int) -> tuple[list[Kill], dict[str, bytes]]:
        """Die once for each aim, then run to the end: the kills that struck, every shard's bytes."""
        rng = random.Random(seed)
        kills = [self._kill_once(aim, rng) for aim in aims]
        return [kill for kill in kills if kill is not None], self.run(rng.choice((1, 2)))

    def _count(self, stage: str) -> int:
        return sum(not path.name.startswith(".") for path in self.partial.glob(STAGES[stage]))

    def _kill_once(self, aim: str, rng: random.Random) -> Kill | None:
        """One life: killed some files into a stage, or after some time. None if it ended before."""
        workers, whom = rng.choice((1, 2)), rng.choice(("group", "parent"))
        end = rng.choice(self.ends)
        process = self.start(workers)
        if aim == "any":
            time.sleep(rng.uniform(0, 8))
        else:
            wanted = self._count(aim) + rng.randint(1, 25)
            while self._count(aim) < wanted and process.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.05))
        struck = process.poll() is None
        found = Kill(end, aim, whom, workers, self._count("encode"), self._count("shards"))
        if end == "full disk":
            self._fill_disk(process)
        else:
            number = signal.Signals[end]
            if struck:
                os.kill(process.pid, number)
            if whom == "group":
                _signal_group(process.pid, number)
            process.wait(60)
        deadline = time.monotonic() + 60
        while _signal_group(process.pid, 0):  # orphans end by themselves
            assert time.monotonic() < deadline, "workers outlive their killed parent"
            time.sleep(0.05)
        return found if struck else None

    def _fill_disk(self, process: Any) -> None:
        """Until the command ends, in a sentence."""
        before = self.log.stat().st_size
        with full_disk(self.output.parent, 0, lambda: process.poll() is None):
            status = process.wait(120)
        text = self.log.read_bytes()[before:].decode()
        assert status == 0 or (status == 2 and "no space" in text.lower()), f"{status}:\n{text}"
        assert "Traceback" not in text, text


def _signal_group(group: int, number: int) -> bool:
    """Whether there is still a process in the group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--ends", nargs="+", default=["SIGKILL"], help="signals, or 'full disk'")
    parser.add_argument("--output", help="default: benchmarks/results/kill_prepare[_ends].json")
    options = parser.parse_args()
    name = "kill_prepare" if options.ends == ["SIGKILL"] else "kill_prepare_ends"
    output = Path(options.output or ROOT / f"benchmarks/results/{name}.json")

    began = time.monotonic()
    kills, equal = [], 0
    with (
        tempfile.TemporaryDirectory() as temporary,
        small_disk(
            Path(temporary, "runs"), DISK_MIB if "full disk" in options.ends else 0
        ) as folder,
    ):
        expected = Preparation(folder / "unbroken").run()
        for number in range(options.runs):
            preparation = Preparation(folder / f"killed{number}", options.ends)
            found, shards = preparation.kill_and_finish(
                ["encode", "any", "shards"], options.seed + number
            )
            same = shards == expected
            shutil.rmtree(preparation.output)
            equal += same
            kills += found
            elapsed = time.monotonic() - began
            remaining = elapsed / (number + 1) * (options.runs - number - 1)
            moments = ", ".join(
                f"{k.end} in {k.stage} ({k.chunks} chunks, {k.shards} shards)" for k in found
            )
            print(
                f"run {number + 1}/{options.runs}: same shards {same}, ended at {moments}, ETA "
                f"{remaining:.0f} s",
                flush=True,
            )
    by_stage = Counter(kill.stage for kill in kills)
    report = {
        "runs": options.runs,
        "runs_with_the_same_bytes_in_every_shard": equal,
        "shards": len(expected),
        "shard_bytes": sum(map(len, expected.values())),
        "kills": len(kills),
        "ends": Counter(kill.end for kill in kills),
        "kills_by_stage": dict(by_stage),
        "kills_of_the_parent_alone": sum(kill.whom == "parent" for kill in kills),
        "kills_with_two_workers": sum(kill.workers == 2 for kill in kills),
        "moments": [vars(kill) for kill in kills],
        "seconds": time.monotonic() - began,
        "conditions": environment(),
    }
    write_atomic(output, json.dumps(report, indent=2) + "\n")
    good = equal == options.runs and by_stage["encode"] and by_stage["shards"]
    print(f"{'passed' if good else 'FAILED'}: {output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
