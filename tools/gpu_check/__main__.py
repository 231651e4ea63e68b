"""Checks and measures this code on one GPU: steps, ceilings, blocks, numerics, goodput, sampling.

    scripts/gpu_check.sh                      # one GPU, under ten minutes
    scripts/gpu_check.sh --groups step,block --only compiled --minutes 5
    scripts/gpu_check.sh --tiny               # all of it on a CPU at small sizes

Writes benchmarks/results/gpu_check_<device>.json, a line per item, and beside it the compiled kernels, which --cache
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
from tools.gpu_check.items import FAILED, described
from tools.gpu_check.settings import ROOT, Settings
from tools.gpu_check.supervisor import Entry, Supervisor, clean, stages

GROUPS = ("step", "ceilings", "block", "numerics", "goodput", "sampling")
FLAVORS = ("debug", "800M", "3B", "8B")
PART_BYTES = 15 << 20  # of the packed kernels: machines give back files of limited size


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--groups", default=",".join(GROUPS), help="some of them, in your order")
    parser.add_argument("--only", default="", help="a part of the names of the items")
    parser.add_argument("--flavors", help="sizes with commas (default 800M; --tiny: debug)")
    parser.add_argument("--micro-batch", type=int, default=0, help="of the steps")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--work", type=Path, help="folder of rows and logs, which is kept")
    parser.add_argument(
        "--cache", type=Path, nargs="+", default=[], help="packed kernels, in order"
    )
    parser.add_argument("--commit", default="", help="of the sources, where there is no git")
    options = parser.parse_args(given)
    options.flavors = options.flavors or ("debug" if options.tiny else "800M")
    for name, known in (("groups", GROUPS), ("flavors", FLAVORS)):
        chosen = tuple(getattr(options, name).split(","))
        setattr(options, name, chosen)
        if wrong := [each for each in chosen if each not in known]:
            parser.error(f"--{name} {','.join(wrong)}: there are {','.join(known)}")
    return options


def pack(folder: Path, out: Path) -> list[Path]:
    """Compressed files of a folder, in parts `OUT.cache.0` and so on."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
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
    began = time.time()
    options = arguments(given)
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import torch

        from torchtitan.models.dit_tts.files import write_atomic
        from torchtitan.models.dit_tts.run.run_folder import environment
    except ImportError as error:
        print(
            f"error: {error}; install the project, or bring wheels: scripts/gpu_check.sh "
            "--collect-wheels DIR where there is a network, then scripts/gpu_check.sh --wheels DIR here",
            file=sys.stderr,
        )
        return 2
    if not options.tiny and not torch.cuda.is_available():
        print("error: torch sees no GPU; --tiny runs all of it on a CPU", file=sys.stderr)
        return 2
    found = environment()
    found["variables"].pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch's; the check has its own
    if options.commit:
        found["git_commit"] = options.commit
    work = (options.work or Path(tempfile.mkdtemp(prefix="gpu_check_"))).resolve()
    clean(work)
    if options.cache:
        unpack(options.cache, work / "inductor")
    device = "cpu" if options.tiny else "cuda"
    gib = 1e6 if options.tiny else 0.95 * torch.cuda.mem_get_info()[0] / 2**30
    where = (options.groups, options.flavors, options.micro_batch, options.only)
    settings = Settings(device, options.tiny, str(work), *where)
    kind = "cpu_tiny" if options.tiny else re.sub(r"[^a-z0-9]+", "_", found["device"].lower())
    out = options.out or ROOT / f"benchmarks/results/gpu_check_{kind}.json"

    def passed(entries: list[Entry]) -> bool:
        return not any(entry.row is not None and entry.row.status == FAILED for entry in entries)

    def keep(entries: list[Entry]) -> None:
        lines = telemetry.read(work / "telemetry.csv")
        for entry in entries:
            if entry.row is not None and entry.row.began:
                ended = entry.row.began + entry.row.seconds
                entry.row.values["clocks"] = telemetry.between(lines, entry.row.began, ended)
        report = {
            "format": 2,
            "passed": passed(entries),
            "complete": all(entry.row is not None for entry in entries),
            "seconds": time.time() - began,
            "command": ["scripts/gpu_check.sh", *given],
            "environment": found,
            "stages": stages(entries),
        }
        # Where this machine has the sources and the runs is no result.
        text = json.dumps(report, indent=1).replace(f"{ROOT}/", "").replace(str(work), "work")
        write_atomic(out, text + "\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    watched = None if options.tiny and not shutil.which("nvidia-smi") else True
    watch = telemetry.start(work / "telemetry.csv") if watched else None
    end = began + options.minutes * 60
    supervisor = Supervisor(
        settings, os.cpu_count() or 1, gib, end, lambda s: print(s, flush=True), keep
    )
    try:
        entries = supervisor.run()
    finally:
        if watch is not None:
            watch.kill()
            watch.wait()
    keep(entries)
    for entry in entries:
        if entry.row is not None:
            print(f"  {entry.row.item:<60} {described(entry.row)}")
    parts = pack(work / "inductor", out)
    print(f"compiled kernels for --cache: {' '.join(map(str, parts)) or 'none'}")
    print(f"{'passed' if passed(entries) else 'FAILED'} in {time.time() - began:.0f} s; {out}")
    if options.work or not passed(entries):
        print(f"rows and logs: {work}")
    else:
        shutil.rmtree(work)
    return 0 if passed(entries) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
