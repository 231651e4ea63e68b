"""Compares our loader with webdataset and a plain copy as ways to the same padded batches.

    OMP_NUM_THREADS=1 python benchmarks/loader.py

Writes 4,000 synthetic utterances (log-normal, mean 9 s) as tars, holds every contender's batches against ours by
content, then times all in turn, round after round in rotated order, with 0 and 2 workers. Writes
benchmarks/results/loader.json; exit status 1 where batches differ or an aim is missed.
"""

import argparse
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import xxhash  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.common import RESULTS, cell, ratios, rotated, spread, write_report  # noqa: E402
from benchmarks.contenders import (  # noqa: E402
    COPY,
    OURS,
    WEBDATASET,
    Archives,
    Batch,
    Pass,
    make_contenders,
    make_ours,
)
from benchmarks.synthetic_speech import SAMPLES_A_SHARD, write_archives  # noqa: E402
from torchtitan.models.dit_tts.errors import InputError, report_input_errors  # noqa: E402

COMPARED = ("latents", "speaker", "text_ids", "text_tokens", "speaker_frames", "frames", "labels")
AIM_WEBDATASET, AIM_COPY = 6.0, 1.3
WORKERS = (0, 2)
BATCH_SIZE = 32  # rows of the longest bucket
UNITS = ("cpu_us", "wall_us")
_TICKS = os.sysconf("SC_CLK_TCK")


# ---- equality


def row_digests(batch: Batch) -> Iterable[tuple[str, tuple[int, ...]]]:
    """(sample's key, hash of its row of each tensor, with dtype and shape; 0 where there is none)."""
    tensors = {**batch[0], "labels": batch[1]}
    for row, sample_id in enumerate(tensors["sample_id"]):
        digests = []
        for name in COMPARED:
            tensor = tensors.get(name)
            if tensor is None:
                digests.append(0)
                continue
            values = tensor[row].contiguous().numpy()
            seed = hash((str(values.dtype), values.shape)) & 0xFFFFFFFF
            digests.append(xxhash.xxh3_64_intdigest(values.tobytes(), seed))
        yield sample_id.rsplit(":", 1)[-1], tuple(digests)


def check_equal(
    passes: dict[str, Pass], expected: dict[str, tuple[int, ...]], progress: tqdm, workers: int
) -> list[str]:
    """Runs one pass of each; returns what differs from ``expected``, a sentence a contender."""
    differences = []
    for name, run in passes.items():
        progress.set_description(f"equality, {workers} workers, {name}")
        if name == COPY and workers:
            sum(len(batch[0]["sample_id"]) for batch in run())  # its rows are overwritten
            progress.update()
            continue
        rows, seen, unequal = 0, set(), []
        for batch in run():
            for key, digests in row_digests(batch):
                rows += 1
                seen.add(key)
                # The copy has only the first two tensors.
                known = tuple(e if d else 0 for d, e in zip(digests, expected[key], strict=True))
                if digests != known or not all(digests[:2]):
                    unequal.append(key)
        progress.update()
        # Ours begins a pass where the last ended, so that a sample may come twice in one.
        once = name == OURS or (rows == len(expected) and len(seen) == rows)
        if unequal or not once:
            differences.append(
                f"{name} with {workers} workers: {len(unequal)} rows differ, {len(seen)} of "
                f"{len(expected)} samples in {rows} rows"
            )
    return differences


def expected_rows(run: Pass, samples: int) -> dict[str, tuple[int, ...]]:
    """Return the digests of every sample, by our loader; its order is endless, so a few passes show all."""
    expected: dict[str, tuple[int, ...]] = {}
    for _ in range(3):
        for batch in run():
            for key, digests in row_digests(batch):
                if expected.setdefault(key, digests) != digests:
                    raise RuntimeError(f"sample '{key}' came out in two ways")
        if len(expected) == samples:
            return expected
    raise RuntimeError(f"only {len(expected)} of {samples} samples came in three passes")


# ---- time


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its living worker processes, with all threads."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(stat[11]) + int(stat[12])) / _TICKS
    return total


def timed(run: Pass) -> dict[str, float]:
    """One pass that drops its batches: us of CPU and of wall time per sample."""
    rows = 0
    cpu, wall = cpu_seconds(), time.perf_counter()
    for batch in run():
        rows += len(batch[0]["sample_id"])
        del batch
    wall = time.perf_counter() - wall
    cpu = cpu_seconds() - cpu
    return {"cpu_us": cpu / rows * 1e6, "wall_us": wall / rows * 1e6}


def measure(
    passes: dict[str, Pass], rounds: int, progress: tqdm, workers: int
) -> dict[str, list[dict[str, float]]]:
    """Each contender once a round."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in passes}
    for number in range(rounds):
        for name in rotated(list(passes), number):
            progress.set_description(f"{workers} workers, {name}")
            results[name].append(timed(passes[name]))
            progress.update()
    return results


def summarize(results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Medians with the extremes; ratios are taken within a round, where conditions are alike."""
    summary = {}
    for name, rows in results.items():
        summary[name] = {unit: spread([row[unit] for row in rows]) for unit in UNITS}
        for other in (OURS, COPY):
            for unit in UNITS:
                both = ([row[unit] for row in of] for of in (rows, results[other]))
                summary[name][f"{unit}_over_{other}"] = ratios(*both)
    return summary


def table(summary: dict[str, dict[str, Any]]) -> str:
    """Markdown, slowest first."""
    lines = [
        "| loader | CPU µs per sample | × ours | × plain copy | wall µs per sample |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(summary.items(), key=lambda item: -item[1]["cpu_us"]["median"]):
        lines.append(
            f"| {name} | {cell(row['cpu_us'], 0)} | {cell(row[f'cpu_us_over_{OURS}'], 1)} | "
            f"{cell(row[f'cpu_us_over_{COPY}'], 1)} | {cell(row['wall_us'], 0)} |"
        )
    return "\n".join(lines)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7, help="of every contender")
    parser.add_argument("--output", type=Path, default=RESULTS / "loader.json")
    options = parser.parse_args(args)
    if options.samples < SAMPLES_A_SHARD * max(WORKERS):
        parser.error(f"--samples: webdataset's workers share out shards of {SAMPLES_A_SHARD}")
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread of its own while worker processes are forked
    if importlib.util.find_spec(WEBDATASET) is None:
        raise InputError(
            "webdataset is not installed: pip install --no-deps -r benchmarks/requirements.txt"
        )
    runs, differences = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tar_paths = write_archives(folder / "tar", options.samples, 0)
        loader = make_ours(folder / "tar", BATCH_SIZE, 0)
        archives = Archives(tar_paths, loader.policy)
        contenders = {
            workers: make_contenders(archives, folder / "tar", BATCH_SIZE, workers)
            # The most workers first: processes are forked before there are threads.
            for workers in sorted(WORKERS, reverse=True)
        }
        with tqdm(total=3 * len(contenders) * (1 + options.rounds)) as progress:
            expected = expected_rows(contenders[min(contenders)][OURS], options.samples)
            for workers, passes in contenders.items():
                differences += check_equal(passes, expected, progress, workers)
            for workers, passes in sorted(contenders.items()):
                results = measure(passes, options.rounds, progress, workers)
                runs.append({"workers": workers, "summary": summarize(results)})
        data = {
            "samples": options.samples,
            "hours": int(loader.dataset.frames.sum(dtype="int64")) / 25 / 3600,
            "tar_bytes": sum(os.path.getsize(path) for path in tar_paths),
            "shapes": loader.policy.shapes,
            "rows_of_a_batch": loader.policy.batch_sizes,
        }

    for run in runs:
        print(f"\n{run['workers']} workers\n\n{table(run['summary'])}")
    aims = check_aims(runs)
    report = {
        "data": data,
        "differences": differences,
        "aims": aims,
        "runs": runs,
        "versions": {WEBDATASET: version(WEBDATASET)},
    }
    write_report(options.output, report)
    for sentence in differences:
        print(f"not equal: {sentence}")
    for aim in aims:
        print(f"{aim['claim']}: {aim['measured']:.2f}, {'reached' if aim['reached'] else 'MISSED'}")
    return 0 if not differences and all(aim["reached"] for aim in aims) else 1


def check_aims(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each aim and whether it is met, by the median over rounds of the ratio of CPU time, one process."""
    aims = []
    for summary in (run["summary"] for run in runs if run["workers"] == 0):
        ratio = summary[WEBDATASET][f"cpu_us_over_{OURS}"]["median"]
        claim = f"webdataset takes at least {AIM_WEBDATASET:g} times our CPU time"
        aims.append({"claim": claim, "measured": ratio, "reached": ratio >= AIM_WEBDATASET})
        ratio = summary[OURS][f"cpu_us_over_{COPY}"]["median"]
        claim = f"ours takes at most {AIM_COPY:g} times the CPU time of the plain copy"
        aims.append({"claim": claim, "measured": ratio, "reached": ratio <= AIM_COPY})
    return aims


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
