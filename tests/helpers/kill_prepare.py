"""Kills `titan-tts prepare` with SIGKILL at random moments, goes on, and compares with an unbroken run.

Used by the integration test and, many times over, by benchmarks/kill_prepare.py.
"""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import forked
from tests.helpers.speech_corpora import CORPUS

# Many small chunks and shards: each stage lasts for seconds and has many moments to die in.
SETTINGS = ["--chunk-items", "8", "--samples-per-shard", "8", "--references", "2"]
STAGES = {"encode": "chunks/*.json", "shards": "*/*.tar"}
"""stage -> the files that it makes in the work folder"""


@dataclass
class Kill:
    """One SIGKILL, and what lay in the work folder when it struck."""

    aimed_at: str  # a stage, or "any" moment
    whom: str  # "group": every process at once; "parent": the workers find themselves alone
    workers: int
    chunks: int
    shards: int

    @property
    def stage(self) -> str:
        """Where it struck."""
        return "before" if not self.chunks else "shards" if self.shards else "encode"


def start(output: Path, workers: int) -> forked.Child:
    log = output.with_name(output.name + ".log")
    return forked.start_titan_tts(
        "prepare", CORPUS, output, *SETTINGS, "--workers", workers, log=log
    )


def run(output: Path, workers: int = 1) -> None:
    """A run from start to end, or from where the last one died."""
    status = start(output, workers).wait(300)
    log = output.with_name(output.name + ".log").read_text()
    assert status == 0, f"exit status {status}:\n{log[-4000:]}"


def shards(output: Path) -> dict[str, bytes]:
    """Every shard's bytes by its name."""
    return {str(p.relative_to(output)): p.read_bytes() for p in sorted(output.glob("*/*.tar"))}


def count(output: Path, stage: str) -> int:
    partial = output.with_name(output.name + ".partial")
    return sum(1 for path in partial.glob(STAGES[stage]) if not path.name.startswith("."))


def kill_once(output: Path, aim: str, rng: random.Random) -> Kill | None:
    """One life: killed some files into a stage, or after some time. None if it ended before."""
    workers, whom = rng.choice((1, 2)), rng.choice(("group", "parent"))
    process = start(output, workers)
    try:
        if aim == "any":
            time.sleep(rng.uniform(0, 8))
        else:
            wanted = count(output, aim) + rng.randint(1, 25)
            while count(output, aim) < wanted and process.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.05))
        killed = process.poll() is None
        found = Kill(aim, whom, workers, count(output, "encode"), count(output, "shards"))
    finally:
        process.process.kill()
        if whom == "group":
            _signal_group(process.pid, signal.SIGKILL)
        process.process.join()
    deadline = time.monotonic() + 60
    while _signal_group(process.pid, 0):  # orphans end by themselves
        assert time.monotonic() < deadline, "workers outlive their killed parent"
        time.sleep(0.05)
    return found if killed else None


def _signal_group(group: int, number: int) -> bool:
    """Whether there is still a process in the group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def kill_and_finish(output: Path, aims: list[str], seed: int) -> list[Kill]:
    """A preparation that dies once for each aim and is then let through."""
    rng = random.Random(seed)
    kills = [kill_once(output, aim, rng) for aim in aims]
    run(output, rng.choice((1, 2)))
    assert not output.with_name(output.name + ".partial").exists()
    return [kill for kill in kills if kill is not None]
