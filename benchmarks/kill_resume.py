"""Ends training runs at random moments, many times over, and compares with an unbroken one.

    python benchmarks/kill_resume.py --runs 20
    python benchmarks/kill_resume.py --runs 20 --data everything     # or packed
    python benchmarks/kill_resume.py --runs 50 --ends SIGKILL SIGTERM SIGUSR1 corrupt "full disk" "second start"

What the data and the lives of a run are is in benchmarks/README.md. A full disk needs root, which mounts a tmpfs of
limited size. Writes benchmarks/results/kill_resume.json, or with the data or "ends" in its name.
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

from tools.harness import kill_resume, runs  # noqa: E402
from tools.harness.disks import small_disk  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

DISK_MIB = 900
"""for the unbroken run and the one that is ended: up to five checkpoints of 60 MiB each, and logs"""

DATA = {
    "plain": kill_resume.plain_data,
    "everything": kill_resume.everything_at_once,
    "packed": kill_resume.packed_rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--data", choices=tuple(DATA), default="plain")
    parser.add_argument(
        "--ends",
        nargs="+",
        default=["SIGKILL"],
        help="signals, or "
        + "; ".join(f"'{name}': {what}" for name, what in kill_resume.OTHER_ENDS.items()),
    )
    options = parser.parse_args()
    name = "kill_resume" if options.data == "plain" else f"kill_resume_{options.data}"
    name += "_ends" if options.ends != ["SIGKILL"] else ""
    output = ROOT / f"benchmarks/results/{name}.json"

    began = time.monotonic()
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        DATA[options.data](Path(temporary)) as data,
        small_disk(
            Path(temporary, "runs"), DISK_MIB if "full disk" in options.ends else 0
        ) as folder,
    ):
        kill_resume.make_seed_checkpoint(folder, data, launcher=True)
        arguments = kill_resume.common_arguments(folder, data)
        unbroken = runs.run(folder, "unbroken", arguments, launcher=True)
        for number in range(options.runs):
            outcome = kill_resume.kill_and_resume(
                folder,
                data,
                f"killed{number}",
                unbroken,
                options.seed + number,
                launched=[number % len(kill_resume.LIVES)],
                ends=options.ends,
            )
            outcomes.append(outcome)
            shutil.rmtree(folder / f"killed{number}")
            elapsed = time.monotonic() - began
            remaining = elapsed / (number + 1) * (options.runs - number - 1)
            print(
                f"run {number + 1}/{options.runs}: same ids {outcome.same_ids}, largest loss difference "
                f"{outcome.largest_loss_difference:.2e}, of weights "
                f"{outcome.largest_weight_difference:.2e}, {'/'.join(outcome.ended_by)} after steps {outcome.kills}, ETA "
                f"{remaining:.0f} s",
                flush=True,
            )
    report = {
        "data": options.data,
        "corrupt_samples_replaced_per_run": outcomes[0].replaced,
        "runs": options.runs,
        "ends": Counter(end for o in outcomes for end in o.ended_by),
        "runs_with_the_same_sample_ids_in_every_step": sum(o.same_ids for o in outcomes),
        "largest_loss_difference": max(o.largest_loss_difference for o in outcomes),
        "largest_weight_difference": max(o.largest_weight_difference for o in outcomes),
        "steps_a_run": kill_resume.STEPS,
        "ended_after_steps": [o.kills for o in outcomes],
        "seconds": time.monotonic() - began,
        "conditions": environment(),
    }
    write_atomic(output, json.dumps(report, indent=2) + "\n")
    good = report["runs_with_the_same_sample_ids_in_every_step"] == options.runs
    good = good and report["largest_loss_difference"] < 1e-5
    print(f"{'passed' if good else 'FAILED'}: {output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
