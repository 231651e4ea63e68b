"""How long a run waits for its first batch, and how much memory its data takes.

    OMP_NUM_THREADS=1 python benchmarks/startup.py

1. Index building: real shards, read and hashed in full.
2. Start and mid-epoch resume over 1,000,000 samples in 1,000 shards with stored indexes, each in a new
   process. The shards are hard links to one real tar of 1,000 samples, so every sample can be read and
   the disk holds one tar; their indexes are separate files. What that leaves out: the arrays come from
   the page cache, and the shards' contents and labels are alike.

Writes benchmarks/results/startup.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.common import RESULTS, cell, spread, write_report  # noqa: E402
from benchmarks.contenders import make_ours  # noqa: E402
from benchmarks.synthetic_speech import SAMPLES_A_SHARD, write_archives  # noqa: E402
from torchtitan.models.dit_tts.data.index import load_index  # noqa: E402

BATCH_SIZE = 32


# ---- index


def measure_index(tar_paths: list[str], rounds: int) -> dict[str, Any]:
    """Builds the indexes of real shards anew, round after round, out of the page cache."""
    samples = SAMPLES_A_SHARD * len(tar_paths)
    size = sum(os.path.getsize(path) for path in tar_paths)
    built, loaded = [], []
    for _ in range(rounds):
        for path in tar_paths:
            Path(path + ".idx").unlink(missing_ok=True)
        for seconds in (built, loaded):  # the second time the sidecars are there
            began = time.process_time()
            for path in tar_paths:
                load_index(path)
            seconds.append(time.process_time() - began)
    index_bytes = sum(os.path.getsize(path + ".idx") for path in tar_paths)
    return {
        "samples": samples,
        "tar_bytes": size,
        "build_us_per_sample": spread([s / samples * 1e6 for s in built]),
        "build_mb_a_second": spread([size / s / 1e6 for s in built]),
        "load_us_per_sample": spread([s / samples * 1e6 for s in loaded]),
        "index_bytes_a_sample": index_bytes / samples,
    }


# ---- a million samples


def link_shards(tar_path: str, folder: Path, shards: int) -> int:
    """``shards`` names for one tar, each with an index of its own; returns the indexes' bytes."""
    load_index(tar_path)
    folder.mkdir()
    total = 0
    for number in tqdm(range(shards), desc="indexes"):
        shard = folder / f"shard-{number:06d}.tar"
        os.link(tar_path, shard)
        shutil.copyfile(tar_path + ".idx", f"{shard}.idx")
        total += os.path.getsize(f"{shard}.idx")
    return total


def drop_indexes(folder: Path) -> None:
    """Asks the kernel to forget the stored indexes' pages."""
    for path in folder.glob("*.idx"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def memory_mib() -> dict[str, float]:
    """Resident now and at most, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        name: int(fields[key].split()[0]) / 1024
        for name, key in (("now", "VmRSS"), ("most", "VmHWM"))
    }


def child(folder: str, workers: int, resume: bool, batches: int) -> dict[str, Any]:
    """One start in this process: seconds from the first call, MiB beyond the imports.

    Args:
        resume: go to the middle of the first epoch before the first batch.
        batches: taken before memory is read.
    """
    torch.set_num_threads(1)
    imports = memory_mib()["now"]

    began = time.perf_counter()
    loader = make_ours(Path(folder), BATCH_SIZE, workers)
    built = time.perf_counter() - began
    held = memory_mib()["now"] - imports
    state = loader.state_dict()
    if resume:
        state["global_batch"] = int(loader.order.batches_per_epoch) // 2
    resuming = time.perf_counter()
    loader.load_state_dict(state)
    batches_ahead = iter(loader)
    first = next(batches_ahead)
    now = time.perf_counter()
    number = int(first[0]["global_batch"])
    assert number == state["global_batch"]
    del first
    for _ in range(batches - 1):
        next(batches_ahead)
    memory = memory_mib()
    return {
        "samples": len(loader.dataset),
        "first_batch_number": number,
        "loader_seconds": built,
        "first_batch_seconds": now - resuming,
        "start_to_first_batch_seconds": now - began,
        "loader_mib": held,
        "running_mib": memory["now"] - imports,
        "most_mib": memory["most"] - imports,
        "imports_mib": imports,
    }


def run_child(folder: Path, workers: int, resume: bool, batches: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", str(folder), "--workers", str(workers)]
    command += ["--batches", str(batches)] + (["--resume"] if resume else [])
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"a start failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def measure_starts(folder: Path, rounds: int, batches: int) -> dict[str, Any]:
    """Cold indexes first in each round, then warm with 0, 1 and 4 threads, then a resume."""
    cases = {
        "indexes on disk": (0, False, True),
        "indexes in page cache": (0, False, False),
        "1 thread": (1, False, False),
        "4 threads": (4, False, False),
        "resume, mid-epoch": (0, True, False),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with tqdm(total=rounds * len(cases)) as progress:
        for _ in range(rounds):
            for name, (workers, resume, cold) in cases.items():
                progress.set_description(name)
                if cold:
                    drop_indexes(folder)
                found[name].append(run_child(folder, workers, resume, batches))
                progress.update()
    summary = {
        name: {key: spread([row[key] for row in rows]) for key in rows[0]}
        for name, rows in found.items()
    }
    increments = [
        (four["running_mib"] - one["running_mib"]) / 3
        for one, four in zip(found["1 thread"], found["4 threads"], strict=True)
    ]
    return {"starts": summary, "mib_a_thread": spread(increments)}


def show(report: dict[str, Any]) -> None:
    index = report["index"]
    print(
        f"\nindex: {cell(index['build_us_per_sample'], 1)} us of CPU per sample to build, "
        f"{cell(index['build_mb_a_second'], 0)} MB/s; {index['index_bytes_a_sample']:.0f} bytes a "
        f"sample; {cell(index['load_us_per_sample'], 2)} us per sample to load\n"
    )
    print(
        "| start over a million samples | loader built, s | to first batch, s | together, s | "
        "loader, MiB | running, MiB |"
    )
    print("|---|---|---|---|---|---|")
    for name, row in report["million"]["starts"].items():
        print(
            f"| {name} | {cell(row['loader_seconds'])} | {cell(row['first_batch_seconds'], 3)} | "
            f"{cell(row['start_to_first_batch_seconds'])} | {cell(row['loader_mib'], 0)} | "
            f"{cell(row['running_mib'], 0)} |"
        )
    print(f"a thread's memory: {cell(report['million']['mib_a_thread'], 0)} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, default=1000, help="of 1,000 samples each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40, help="taken before memory is read")
    parser.add_argument("--folder", default=None, help="where the data goes for the while")
    parser.add_argument("--output", type=Path, default=RESULTS / "startup.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        outcome = child(options.child, options.workers, options.resume, options.batches)
        print(json.dumps(outcome))
        return 0

    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        tar_paths = write_archives(folder / "real", 4 * SAMPLES_A_SHARD, seed=0)
        index = measure_index(tar_paths, options.rounds)
        index_bytes = link_shards(tar_paths[0], folder / "million", options.shards)
        million = measure_starts(folder / "million", options.rounds, options.batches)
    report = {
        "index": index,
        "million": {
            "samples": options.shards * SAMPLES_A_SHARD,
            "shards": options.shards,
            "index_bytes": index_bytes,
            "batch_size": BATCH_SIZE,
            "batches_before_memory_is_read": options.batches,
            **million,
        },
    }
    write_report(options.output, report)
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
