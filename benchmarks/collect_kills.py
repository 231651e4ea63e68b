"""Ends workers of `titan-tts collect` at random moments, many times over, and compares what they collect.

    python benchmarks/collect_kills.py --runs 20

Each run collects the same recordings with two workers and an analysis of milliseconds. It is ended several times by
SIGKILL, to one worker, to the command alone or to all its processes, and then let through; with the queue in a file
and in PostgreSQL (which is started here). Every job must then be done, and files/ and collection.jsonl must have the
bytes of a run that nobody ended. Writes benchmarks/results/collect_kills.json.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from titan_tts.collect.open_queue import open_queue  # noqa: E402
from tools.harness.postgres import postgres_server, programs  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402

RATE = 16_000
SEGMENT_SECONDS = 1.0


class StandIn:
    """Takes every whole second for a segment; its text says which samples it has, so that none can stand with others.

    Args:
        milliseconds: that a recording takes.
    """

    def __init__(self, milliseconds: float):
        self.milliseconds = milliseconds

    def analyze(
        self, samples: np.ndarray, rate: int, progress: Callable[[str, float], None]
    ) -> list[Any]:
        length, segments = round(SEGMENT_SECONDS * rate), []
        for number in range(len(samples) // length):
            waveform = samples[number * length : (number + 1) * length].mean(axis=1)
            text = text_of(waveform)
            # Half of them loud, half quiet: two voices.
            embedding = np.array([1.0, 0.0] if np.abs(waveform).max() > 0.5 else [0.0, 1.0])
            measured = {"agreement": 1.0, "snr_db": 30.0, "clipped": 0.0, "loudness": -20.0}
            measured |= {"chars_per_second": 16.0, "overlap": None, "quality": "high"}
            times = {"start": number * SEGMENT_SECONDS, "stop": (number + 1) * SEGMENT_SECONDS}
            segments.append(
                SimpleNamespace(
                    **times, **measured, text=text, text_verbatim=text, language="en",
                    embedding=embedding, waveform=waveform,
                )
            )  # fmt: skip
            progress("text", times["stop"])
        time.sleep(self.milliseconds / 1000)
        return segments


def text_of(waveform: np.ndarray) -> str:
    """Of samples as a FLAC of 16 bits holds them."""
    return hashlib.sha256(np.round(waveform * 32768).astype("<i2").tobytes()).hexdigest()[:16]


def stand_in(device: str, milliseconds: str = "0") -> StandIn:
    return StandIn(float(milliseconds))


def write_recordings(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(count):
        noise = rng.uniform(-1, 1, (RATE * rng.integers(1, 6) + 100, 1))
        level = 0.9 if number % 2 else 0.1
        soundfile.write(folder / f"{number:03d}.wav", level * noise, RATE)


def content(output: Path) -> dict[str, str]:
    """{name: hash} of all that must be the same."""
    paths = [*(output / "files").rglob("*.*"), output / "collection.jsonl"]
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


class Collecting:
    """Runs of one collected folder."""

    def __init__(self, source: Path, output: Path, queue: str, milliseconds: int):
        self.output, self.queue = output, queue
        self.log = output.with_suffix(".log")
        self._arguments = [str(source), str(output), "--workers", "2", "--attempts", "1000"]
        self._arguments += ["--analyzer", f"benchmarks.collect_kills:stand_in:{milliseconds}"]
        self._arguments += ["--queue", queue, "--lease-seconds", "1"] if queue else []

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "titan_tts", "collect", *self._arguments]
        with open(self.log, "a") as log:
            return subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def kill_once(self, rng: random.Random) -> dict[str, Any] | None:
        """Some recordings further on; None where it ended before."""
        process = self.start()
        wanted = self._complete() + rng.randint(0, 6)
        while self._complete() < wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1) if wanted else rng.uniform(0, 3))
        whom = rng.choice(("worker", "command", "all"))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers = children.read_text().split() if process.poll() is None else []
        if process.poll() is not None:
            return None
        found = {"whom": whom, "complete": self._complete()}
        if whom == "worker":
            if workers:
                os.kill(int(rng.choice(workers)), signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.5))  # a new one takes its place
        process.kill()
        if whom != "command":
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return found

    def finish(self) -> dict[str, str]:
        status = self.start().wait(300)
        assert status == 0, f"exit status {status}:\n{self.log.read_text()[-4000:]}"
        return content(self.output)

    def counts(self) -> dict[str, int]:
        record = json.loads((self.output / "collect.json").read_text())
        return open_queue(self.queue, self.output, record["collection"]).counts()

    def _complete(self) -> int:
        return len(list((self.output / "files").glob("*")))


def measure(engine: str, queue: str, folder: Path, runs: int, recordings: int) -> dict[str, Any]:
    source = folder / "recordings"
    expected = Collecting(source, folder / f"unbroken-{engine}", queue, 20).finish()
    kills, equal, once = [], 0, 0
    for number in range(runs):
        rng = random.Random(number)
        collecting = Collecting(source, folder / f"{engine}{number}", queue, 20)
        found = [collecting.kill_once(rng) for _ in range(4)]
        same = collecting.finish() == expected
        complete = collecting.counts() == {
            "pending": 0,
            "claimed": 0,
            "done": recordings,
            "dead": 0,
        }
        kills += [kill for kill in found if kill]
        equal, once = equal + same, once + complete
        shutil.rmtree(collecting.output)
        print(f"{engine} {number + 1}/{runs}: same {same}, done once {complete}", flush=True)
    return {
        "runs": runs,
        "runs_with_the_same_bytes": equal,
        "runs_with_every_job_done_once": once,
        "files_compared": len(expected),
        "kills": len(kills),
        "kills_by_whom": Counter(kill["whom"] for kill in kills),
        "complete_recordings_at_the_kills": sorted(kill["complete"] for kill in kills),
    }


def main() -> int:
    from torchtitan.models.dit_tts.run.run_folder import environment

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--recordings", type=int, default=40)
    options = parser.parse_args()
    servers = programs()
    assert servers is not None, "install postgresql"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, postgres_server(servers) as url:
        folder = Path(temporary)
        write_recordings(folder / "recordings", options.recordings)
        engines = {"sqlite": "", "postgresql": url}
        report: dict[str, Any] = {
            name: measure(name, queue, folder, options.runs, options.recordings)
            for name, queue in engines.items()
        }
    good = all(
        each["runs_with_the_same_bytes"] == each["runs_with_every_job_done_once"] == options.runs
        for each in report.values()
    )
    report |= {"recordings": options.recordings, "seconds": time.monotonic() - began}
    output = ROOT / "benchmarks/results/collect_kills.json"
    write_atomic(output, json.dumps(report | {"conditions": environment()}, indent=2) + "\n")
    print(f"{'passed' if good else 'FAILED'}: {output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
