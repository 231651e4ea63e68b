"""Ends workers of `titan-tts collect` at random moments, many times over, and compares what they collect.

    python benchmarks/collect_kills.py --runs 20

Each run collects the same recordings with two workers and an analysis of milliseconds. It is ended four times by
SIGKILL, to one worker and then to all, to the command alone, or to all its processes at once, and then let through;
with the queue in a file and in PostgreSQL (which is started here). Every job must then be done, and files/ and
collection.jsonl must have the bytes of a run that nobody ended. Writes benchmarks/results/collect_kills.json.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.kill_prepare import start_command  # noqa: E402
from titan_tts.collect.folder import read_record  # noqa: E402
from titan_tts.collect.queue import open_queue  # noqa: E402
from tools.harness.postgres import postgres_server, programs  # noqa: E402
from tools.harness.stand_in_analyzer import write_recordings  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

RECORDINGS = 40
KILLS = 4  # of each run
ANALYZER = "tools.harness.stand_in_analyzer:stand_in:20"


class Collecting:
    """Runs of one collected folder; `start(arguments, log)` starts titan-tts."""

    def __init__(self, source: Path, output: Path, queue: str = "", start: Any = start_command):
        self.output, self.queue, self.log = output, queue, output.with_suffix(".log")
        self._start = start
        self._arguments = ["collect", str(source), str(output), "--analyzer", ANALYZER]
        self._arguments += ["--workers", "2", "--attempts", "1000", "--lease-seconds", "1"]
        self._arguments += ["--queue", queue]

    def start(self) -> Any:
        return self._start(self._arguments, self.log)

    def complete(self) -> int:
        return len(list((self.output / "files").glob("*")))

    def kill_once(self, rng: random.Random) -> dict[str, Any] | None:
        """At the start, or some recordings further on. None where it ended before."""
        process = self.start()
        wanted = rng.choice((0, self.complete() + rng.randint(1, RECORDINGS // KILLS)))
        while self.complete() < wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1 if wanted else 3))
        whom, complete = rng.choice(("worker", "command", "all")), self.complete()
        if process.poll() is not None:
            return None
        if whom == "worker" and (workers := _workers(process.pid)):
            os.kill(rng.choice(workers), signal.SIGKILL)
            time.sleep(rng.uniform(0, 2))  # a new one takes its place
        if whom == "command":  # its workers find themselves alone
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        return {"whom": whom, "complete": complete}

    def finish(self) -> dict[str, str]:
        """{name: hash} of all that must be the same."""
        status = self.start().wait(300)
        assert status == 0, f"exit status {status}:\n{self.log.read_text()[-4000:]}"
        found = [*(self.output / "files").rglob("*.*"), self.output / "collection.jsonl"]
        return {
            str(path.relative_to(self.output)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in found
        }

    def counts(self) -> dict[str, int]:
        collection = read_record(self.output)["collection"]
        return open_queue(self.queue, self.output, collection).counts()


def _workers(parent: int) -> list[int]:
    """Its worker processes; another child watches over multiprocessing's resources."""
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with suppress(OSError):  # it has ended
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def measure(queue: str, folder: Path, runs: int) -> dict[str, Any]:
    source, kills, equal, once = folder / "recordings", list[dict[str, Any]](), 0, 0
    expected = Collecting(source, folder / "unbroken", queue).finish()
    for number in range(runs):
        rng, collecting = random.Random(number), Collecting(source, folder / f"{number}", queue)
        found = [collecting.kill_once(rng) for _ in range(KILLS)]
        same = collecting.finish() == expected
        done = collecting.counts() == {"pending": 0, "claimed": 0, "done": RECORDINGS, "dead": 0}
        kills += [kill for kill in found if kill]
        equal, once = equal + same, once + done
        shutil.rmtree(collecting.output)
        print(f"{number + 1}/{runs}: same bytes {same}, all done once {done}", flush=True)
    return {
        "runs": runs,
        "runs_with_the_same_bytes": equal,
        "runs_with_every_job_done_once": once,
        "files_compared": len(expected),
        "kills": len(kills),
        "kills_by_whom": Counter(kill["whom"] for kill in kills),
        "kills_before_the_first_recording": sum(not kill["complete"] for kill in kills),
        "kills_with_recordings_left": sum(0 < kill["complete"] < RECORDINGS for kill in kills),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    began, servers = time.monotonic(), programs()
    assert servers is not None, "install postgresql"
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, postgres_server(servers) as url:
        for name, queue in (("sqlite", ""), ("postgresql", url)):
            write_recordings(Path(temporary, name, "recordings"), RECORDINGS)
            report[name] = measure(queue, Path(temporary, name), runs)
    names = "runs_with_the_same_bytes", "runs_with_every_job_done_once"
    good = all(part[name] == runs for part in report.values() for name in names)
    report |= {"recordings": RECORDINGS, "seconds": time.monotonic() - began}
    output = ROOT / "benchmarks/results/collect_kills.json"
    write_atomic(output, json.dumps(report | {"conditions": environment()}, indent=2) + "\n")
    print(f"{'passed' if good else 'FAILED'}: {output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
