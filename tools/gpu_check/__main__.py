"""Checks and measures this code on one GPU: steps, ceilings, blocks, sampling, numerics, goodput.

Writes benchmarks/results/gpu_check_<device>.json, a line per item, and next to it the compiled kernels for --cache. The exit
status is 1 where a check is over its bar or something ended in an error; what ran out of memory or time is a result.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.gpu_check.supervisor import FAILED, ROOT, Item, Supervisor

GROUPS = ("step", "ceilings", "block", "sampling", "numerics", "goodput")
PART_BYTES = 15 << 20  # of the packed kernels: machines give back files of limited size


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/gpu_check.sh", description=__doc__)
    add = parser.add_argument
    add("--tiny", action="store_true", help="small sizes on a CPU")
    add("--groups", nargs="+", default=GROUPS, choices=GROUPS, help="in your order")
    add("--only", default="", help="a part of the names of the items")
    add("--flavors", nargs="+", choices=("debug", "800M", "3B", "8B"))
    add("--minutes", type=float, default=9.0)
    add("--out", type=Path, help="file of the results")
    add("--cache", type=Path, nargs="+", help="packed kernels, in order")
    add("--commit", default="", help="of the sources, where there is no git")
    options = parser.parse_args(given)
    options.flavors = options.flavors or ["debug" if options.tiny else "800M"]
    return options


def pack(folder: Path, out: Path) -> list[Path]:
    """Compressed files of a folder, in parts `OUT.cache.0` and so on."""
    command = ["tar", "-cz", "--exclude=*.lock", "-C", str(folder), "."]
    content, parts = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, []
    for number, start in enumerate(range(0, len(content), PART_BYTES)):
        parts.append(out.with_name(f"{out.name}.cache.{number}"))
        parts[-1].write_bytes(content[start : start + PART_BYTES])
    return parts


def unpack(parts: list[Path], folder: Path) -> None:
    content = b"".join(part.read_bytes() for part in parts)
    subprocess.run(["tar", "-xz", "-C", str(folder)], input=content, check=True)


def main(given: list[str]) -> int:
    began, options = time.time(), arguments(given)
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from tools.gpu_check import kernels, measuring, numerics, steps
    from torchtitan.models.dit_tts.files import write_atomic
    from torchtitan.models.dit_tts.run.run_folder import environment

    if not options.tiny and not torch.cuda.is_available():
        print("error: torch sees no GPU; --tiny runs all of it on a CPU", file=sys.stderr)
        return 2
    found = environment()
    found["variables"].pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch's; the check has its own
    found["git_commit"] = options.commit or found["git_commit"]
    work = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    cache, clocks = work / "inductor", work / "clocks.csv"
    cache.mkdir()
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": f"{cache}/triton"}
    if options.tiny:  # our own kernels; the compiler's for a CPU are not Triton's
        os.environ["TRITON_INTERPRET"] = "1"
    if options.cache:
        unpack(options.cache, cache)
    gib = 1e6 if options.tiny else 0.95 * torch.cuda.mem_get_info()[0] / 2**30
    kind = "cpu_tiny" if options.tiny else re.sub(r"[^a-z0-9]+", "_", found["device"].lower())
    out = options.out or ROOT / f"benchmarks/results/gpu_check_{kind}.json"

    options.work, options.device = work, "cpu" if options.tiny else "cuda"
    of_group = {"step": steps.items, "ceilings": kernels.ceilings, "block": kernels.blocks}
    of_group |= {"numerics": numerics.items, "goodput": steps.goodput, "sampling": kernels.sampling}
    chosen: dict[str, list[Item]] = {
        group: [item for item in of_group[group](options) if options.only in item.name]
        for group in options.groups
    }
    items = [item for group in chosen.values() for item in group]

    def keep() -> bool:
        """Writes what there is; True where no item has failed."""
        rows = [item.row for item in items if item.row is not None]
        for row in rows:
            if row.began:
                row.values["clocks"] = measuring.clocks(clocks, row.began, row.seconds)
        passed = not any(row.status == FAILED for row in rows)
        report = {
            "format": 2,
            "passed": passed,
            "complete": len(rows) == len(items),
            "seconds": time.time() - began,
            "command": ["scripts/gpu_check.sh", *given],
            "environment": found,
            "stages": [
                {"name": group, "rows": [vars(item.row) for item in each if item.row]}
                for group, each in chosen.items()
            ],
        }
        # Where this machine has the sources and the runs is no result.
        text = json.dumps(report, indent=1).replace(f"{ROOT}/", "").replace(str(work), "work")
        write_atomic(out, text + "\n")
        return passed

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end = began + options.minutes * 60
    with measuring.watched(clocks):
        Supervisor(items, work, os.cpu_count() or 1, gib, end, keep).run()
    passed, parts = keep(), " ".join(map(str, pack(cache, out)))
    print(f"compiled kernels for --cache: {parts or 'none'}")
    print(f"{'passed' if passed else 'FAILED'} in {time.time() - began:.0f} s; {out}")
    if not passed:
        print(f"rows and logs: {work}")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
