"""Kills `titan-tts prepare` with SIGKILL at random moments, many times over, and compares the shards.

    python benchmarks/kill_prepare.py --runs 20

Each run prepares the embedded corpus and is killed once while it encodes, once while it writes shards
and once at any moment, each time all its processes or the parent alone, with 1 or 2 workers, and is
then let through. Its shards must be those of a run that was never killed, byte for byte. Writes
benchmarks/results/kill_prepare.json.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers import kill_prepare  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run_folder import environment  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/kill_prepare.json"))
    options = parser.parse_args()

    began = time.monotonic()
    kills, equal = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        unbroken = Path(temporary, "unbroken")
        kill_prepare.run(unbroken)
        expected = kill_prepare.shards(unbroken)
        for number in range(options.runs):
            output = Path(temporary, f"killed{number}")
            found = kill_prepare.kill_and_finish(
                output, ["encode", "any", "shards"], options.seed + number
            )
            same = kill_prepare.shards(output) == expected
            shutil.rmtree(output)
            equal += same
            kills += found
            elapsed = time.monotonic() - began
            remaining = elapsed / (number + 1) * (options.runs - number - 1)
            moments = ", ".join(f"{k.stage} ({k.chunks} chunks, {k.shards} shards)" for k in found)
            print(
                f"run {number + 1}/{options.runs}: same shards {same}, killed at {moments}, ETA "
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
        "kills_by_stage": dict(by_stage),
        "kills_of_the_parent_alone": sum(kill.whom == "parent" for kill in kills),
        "kills_with_two_workers": sum(kill.workers == 2 for kill in kills),
        "moments": [vars(kill) for kill in kills],
        "seconds": time.monotonic() - began,
        "conditions": environment(),
    }
    write_atomic(Path(options.output), json.dumps(report, indent=2) + "\n")
    good = equal == options.runs and by_stage["encode"] and by_stage["shards"]
    print(f"{'passed' if good else 'FAILED'}: {options.output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
