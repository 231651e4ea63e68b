"""Gates on speed that need no GPU: what they count or time is written down, and each can fail.

    python benchmarks/speed_gates.py                      # all, some minutes on 2 cores
    python benchmarks/speed_gates.py --only kept          # one; may be given again for more

Exit status 1 where an aim is missed, with what was missed. Writes benchmarks/results/speed_gates.json
(with --only, to --out alone).
"""

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the gates are of the CPU

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.speed import block_traffic, counting  # noqa: E402
from benchmarks.speed.cases import Outcome  # noqa: E402
from torchtitan.models.dit_tts.errors import quiet_known_warnings  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

GATES: dict[str, Callable[[], Outcome]] = {
    "flops": counting.flops,
    "graphs": counting.graphs,
    "traffic": block_traffic.traffic,
    "kept": block_traffic.kept,
    "collectives": counting.collectives,
}
RESULTS = ROOT / "benchmarks/results/speed_gates.json"


def run_gate(gate: Callable[[], Outcome]) -> dict[str, Any]:
    """The gate's outcome as JSON; one that breaks has failed, and the others still run."""
    began = time.perf_counter()
    try:
        outcome = asdict(gate())
    except Exception:
        outcome = {
            "passed": False,
            "aim": "",
            "measured": "error: " + traceback.format_exc().strip().split("\n")[-1],
            "details": {"traceback": traceback.format_exc()},
        }
    return outcome | {"seconds": time.perf_counter() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(GATES), help="a gate to run")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 1 is steadiest")
    parser.add_argument("--out", help=f"JSON to write; {RESULTS.relative_to(ROOT)} without --only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_known_warnings()
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    names = options.only or list(GATES)
    found: dict[str, dict[str, Any]] = {}
    for name in (bar := tqdm(names, unit="gate")):
        bar.set_description(name)
        found[name] = run_gate(GATES[name])
    out = options.out or (None if options.only else str(RESULTS))
    if out:
        report = {"environment": environment(), "options": vars(options), "gates": found}
        write_atomic(Path(out), json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print("\n| gate | aim | measured | reached |\n|---|---|---|---|")
    for name, outcome in found.items():
        reached = "yes" if outcome["passed"] else "**no**"
        print(f"| {name} | {outcome['aim']} | {outcome['measured']} | {reached} |")
    failed = [name for name, outcome in found.items() if not outcome["passed"]]
    if failed:
        print(f"\nmissed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
