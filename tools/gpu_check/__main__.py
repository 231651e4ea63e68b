"""Checks and measures this code on one GPU: numerics, ceilings, blocks, steps, sampling, goodput,
resume.

    scripts/gpu_check.sh                      # one GPU, under ten minutes
    scripts/gpu_check.sh --tiny               # every stage on a CPU at small sizes
    scripts/gpu_check.sh --stages numerics,block --minutes 4

Writes benchmarks/results/gpu_check_<device>.json and prints a table. The exit status is 1 where a check
is over its bar or something ended in an error; what ran out of memory or time is a result.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.gpu_check.settings import ROOT, STAGES, Settings
from tools.gpu_check.supervisor import StageResult, Supervisor
from tools.gpu_check.table import passed, table

_MINUTES = 9.0
_TINY_MINUTES = 15.0
_KNOWN_FLAVORS = ("debug", "800M", "3B", "8B")


def arguments(given: list[str]) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--stages", default=",".join(names), help="some of them, with commas")
    parser.add_argument("--minutes", type=float, help=f"for all stages (default {_MINUTES:g})")
    parser.add_argument("--flavors", help="sizes with commas (default 800M,3B; --tiny: debug)")
    parser.add_argument(
        "--micro-batches", default="", help="of the steps, in the order they are tried"
    )
    parser.add_argument("--out", help="file of the results")
    parser.add_argument(
        "--work", help="folder of runs and logs, which is kept; else a temporary one"
    )
    parser.add_argument("--commit", help="of the sources, where the machine has no git")
    options = parser.parse_args(given)
    options.stages = options.stages.split(",")
    unknown = sorted(set(options.stages) - set(names))
    if unknown:
        parser.error(
            f"--stages {','.join(unknown)}: there is no such stage; there are {','.join(names)}"
        )
    options.flavors = tuple(
        (options.flavors or ("debug" if options.tiny else "800M,3B")).split(",")
    )
    wrong = [flavor for flavor in options.flavors if flavor not in _KNOWN_FLAVORS]
    if wrong:
        parser.error(f"--flavors {','.join(wrong)}: there are {','.join(_KNOWN_FLAVORS)}")
    try:
        options.micro_batches = tuple(int(n) for n in options.micro_batches.split(",") if n)
    except ValueError:
        parser.error(f"--micro-batches {options.micro_batches}: give whole numbers with commas")
    options.minutes = options.minutes or (_TINY_MINUTES if options.tiny else _MINUTES)
    return options


def report(
    options: argparse.Namespace,
    results: list[StageResult],
    environment: dict[str, Any],
    seconds: float,
    complete: bool,
) -> dict[str, Any]:
    """Args:
    seconds: since the check began.
    complete: no item is still to come.
    """
    if options.commit:
        environment["git_commit"] = options.commit
    stages = [result.as_json() for result in results]
    values = [row["values"] for stage in stages for row in stage["rows"]]
    runs = [each.pop("run") for each in values if "run" in each]
    return {
        "format": 1,
        "passed": passed(results),
        "complete": complete,
        "seconds": seconds,
        "command": ["scripts/gpu_check.sh", *sys.argv[1:]],
        "tiny": options.tiny,
        "options": {
            key: value for key, value in vars(options).items() if key not in ("work", "out")
        },
        "environment": environment,
        "stages": stages,
        "runs": runs,
    }


def without_paths(text: str, work: Path) -> str:
    """Where this machine has the sources and the runs is no result."""
    return text.replace(f"{ROOT}/", "").replace(str(work), "work")


def file_name(device: str, tiny: bool) -> str:
    device = (
        "cpu" if device.startswith("CPU") else re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    )
    return f"gpu_check_{device}{'_tiny' if tiny else ''}.json"


def main(given: list[str]) -> int:
    began = time.time()
    options = arguments(given)
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import torch

        import torchtitan.models.dit_tts.trainer  # noqa: F401  what a run needs
        from torchtitan.models.dit_tts.files import write_atomic
        from torchtitan.models.dit_tts.run.run_folder import environment
    except ImportError as error:
        print(
            f"error: {error}; install the project, or bring wheels: scripts/gpu_check.sh "
            f"--collect-wheels DIR where there is a network, then scripts/gpu_check.sh --wheels DIR here",
            file=sys.stderr,
        )
        return 2
    if not options.tiny and not torch.cuda.is_available():
        print(
            "error: torch sees no GPU; scripts/gpu_check.sh --tiny runs every stage on a CPU",
            file=sys.stderr,
        )
        return 2
    found = environment()
    found["variables"].pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch's; the stages have their own
    work = Path(options.work or tempfile.mkdtemp(prefix="gpu_check_")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    for left in work.glob("*.jsonl"):
        left.unlink()  # of an earlier check in the same folder
    settings = Settings(
        device="cpu" if options.tiny else "cuda",
        tiny=options.tiny,
        work=str(work),
        flavors=options.flavors,
        micro_batches=options.micro_batches,
    )
    out = Path(
        options.out or ROOT / "benchmarks/results" / file_name(found["device"], options.tiny)
    )

    def keep(results: list[StageResult], complete: bool = False) -> None:
        content = report(options, results, found, time.time() - began, complete)
        write_atomic(out, without_paths(json.dumps(content, indent=1), work) + "\n")

    supervisor = Supervisor(
        settings,
        options.minutes * 60 - (time.time() - began),
        say=lambda line: print(line, flush=True),
        keep=keep,
    )
    # Who ends the check ends the stage's processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = supervisor.run(options.stages)
    keep(results, complete=True)
    print(table(results))
    print(f"\n{'passed' if passed(results) else 'FAILED'} in {time.time() - began:.0f} s; {out}")
    if options.work:
        print(f"runs and logs: {work}")
    elif passed(results):
        shutil.rmtree(work)
    else:
        print(f"runs and logs are kept: {work}")
    return 0 if passed(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
