"""Checks and measures this code on one GPU: steps, ceilings, blocks, numerics, goodput.

    scripts/gpu_check.sh                      # one GPU, under ten minutes
    scripts/gpu_check.sh --groups step block --only compiled --minutes 5
    scripts/gpu_check.sh --tiny               # all of it on a CPU at small sizes

Writes benchmarks/results/gpu_check_<device>.json, a line per item, and next to it the compiled kernels, which --cache
takes at the next time. The exit status is 1 where a check is over its bar or something ended in an error; what ran out of
memory or time is a result.
"""

import argparse
import io
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tools.gpu_check import telemetry
from tools.gpu_check.items import FAILED, ROOT, Settings

GROUPS = ("step", "ceilings", "block", "numerics", "goodput")
PART_BYTES = 15 << 20  # of the packed kernels: machines give back files of limited size


def arguments(given: list[str]) -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("scripts/gpu_check.sh", None, __doc__, formatter_class=about)
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--groups", nargs="+", default=GROUPS, choices=GROUPS, help="in your order")
    parser.add_argument("--only", default="", help="a part of the names of the items")
    parser.add_argument("--flavors", nargs="+", choices=("debug", "800M", "3B", "8B"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--cache", type=Path, nargs="+", help="packed kernels, in order")
    parser.add_argument("--commit", default="", help="of the sources, where there is no git")
    options = parser.parse_args(given)
    options.flavors = options.flavors or ["debug" if options.tiny else "800M"]
    return options


def pack(folder: Path, out: Path) -> list[Path]:
    """Compressed files of a folder, in parts `OUT.cache.0` and so on."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".lock":
                tar.add(path, str(path.relative_to(folder)))
    content, parts = packed.getvalue(), []
    for number, start in enumerate(range(0, len(content), PART_BYTES)):
        parts.append(out.with_name(f"{out.name}.cache.{number}"))
        parts[-1].write_bytes(content[start : start + PART_BYTES])
    return parts


def unpack(parts: list[Path], folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
        tar.extractall(folder, filter="data")


def main(given: list[str]) -> int:
    began, options = time.time(), arguments(given)
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import torch

        from tools.gpu_check.catalog import catalog
        from tools.gpu_check.supervisor import Supervisor
        from torchtitan.models.dit_tts.files import write_atomic
        from torchtitan.models.dit_tts.run.run_folder import environment
    except ImportError as error:
        print(f"error: {error}; install the project, or bring wheels (--wheels)", file=sys.stderr)
        return 2
    if not options.tiny and not torch.cuda.is_available():
        print("error: torch sees no GPU; --tiny runs all of it on a CPU", file=sys.stderr)
        return 2
    found = environment()
    found["variables"].pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch's; the check has its own
    found["git_commit"] = options.commit or found["git_commit"]
    work = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    (work / "inductor").mkdir()
    if options.cache:
        unpack(options.cache, work / "inductor")
    gib = 1e6 if options.tiny else 0.95 * torch.cuda.mem_get_info()[0] / 2**30
    settings = Settings(options.tiny, str(work), options.groups, options.flavors, options.only)
    kind = "cpu_tiny" if options.tiny else re.sub(r"[^a-z0-9]+", "_", found["device"].lower())
    out = options.out or ROOT / f"benchmarks/results/gpu_check_{kind}.json"

    def keep() -> bool:
        """Writes what there is; True where no item has failed."""
        stages: dict[str, list[dict]] = {}
        rows = [(entry.item.group, entry.row) for entry in supervisor.entries if entry.row]
        for group, row in rows:
            if row.began:
                ended = row.began + row.seconds
                row.values["clocks"] = telemetry.between(clocks, row.began, ended)
            stages.setdefault(group, []).append(vars(row))
        passed = not any(row.status == FAILED for _, row in rows)
        report = {
            "format": 2,
            "passed": passed,
            "complete": len(rows) == len(supervisor.entries),
            "seconds": time.time() - began,
            "command": ["scripts/gpu_check.sh", *given],
            "environment": found,
            "stages": [{"name": group, "rows": each} for group, each in stages.items()],
        }
        # Where this machine has the sources and the runs is no result.
        text = json.dumps(report, indent=1).replace(f"{ROOT}/", "").replace(str(work), "work")
        write_atomic(out, text + "\n")
        return passed

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    clocks, end = work / "telemetry.csv", began + options.minutes * 60
    watch = telemetry.start(clocks) if shutil.which("nvidia-smi") else None
    at_once = os.cpu_count() or 1
    supervisor = Supervisor(settings, catalog(settings), at_once, gib, end, keep)
    try:
        supervisor.run()
    finally:
        if watch is not None:
            watch.kill()
            watch.wait()
    passed = keep()
    for entry in supervisor.entries:
        print(f"  {entry.item.name:<60} {entry.row}")
    parts = pack(work / "inductor", out)
    print(f"compiled kernels for --cache: {' '.join(map(str, parts)) or 'none'}")
    print(f"{'passed' if passed else 'FAILED'} in {time.time() - began:.0f} s; {out}")
    if not passed:
        print(f"rows and logs: {work}")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
