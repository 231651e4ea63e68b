"""The plan of the shipped configs on 4, 16 and 64 GPUs: the table of docs/many_gpus.md.

    python benchmarks/scaling.py                                  # all, hours on 2 cores
    python benchmarks/scaling.py --models 8b --gpus 64 --gpu H100 # a part; the rest of the file stays

Prints the table and writes benchmarks/results/scaling.json: of each model, GPU and number of GPUs what the config's
own rule comes to, and the layout of titan-tts plan --suggest.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from titan_tts.plan import memory  # noqa: E402
from titan_tts.plan.devices import Cluster, find_device  # noqa: E402
from titan_tts.plan.plan import make_plan  # noqa: E402
from titan_tts.plan.step_time import GUESS  # noqa: E402
from titan_tts.plan.suggest import suggest  # noqa: E402
from torchtitan.models.dit_tts.config.manager import load_config  # noqa: E402
from torchtitan.models.dit_tts.config.shipped import find_config  # noqa: E402
from torchtitan.models.dit_tts.errors import quiet_known_warnings  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402

RESULTS = ROOT / "benchmarks/results/scaling.json"
MODELS, GPUS, COUNTS = ("800m", "3b", "8b"), ("H100", "H200", "GH200"), (4, 16, 64)
NOTEWORTHY = 0.01
"""MFU that a suggested layout has to win before the table shows it"""


def remember_passes() -> None:
    """Passes over the model are of no GPU and no number of GPUs: each runs once."""
    known: dict[str, Any] = {}
    measure = memory.kind_memory

    def remembered(config, args, samples, lengths, kind, sharded, encoders):
        budget = config.activation_checkpoint.memory_budget if kind == "memory_budget" else 1
        tensor = config.parallelism.tensor_parallel_degree
        key = repr((args, samples, lengths, kind, budget, sharded, tensor, config.compile))
        if key not in known:
            known[key] = measure(config, args, samples, lengths, kind, sharded, encoders)
        return known[key]

    memory.kind_memory = remembered


def row(model: str, gpu: str, count: int, rule_only: bool) -> dict[str, Any]:
    """The plan of the config's own rule, and the suggested layout or None."""
    device = find_device(gpu)
    cluster, factor = Cluster.of(device, count), GUESS
    config = load_config([f"--job.config_file={find_config(model)}"])
    plan = make_plan(config, cluster, factor)
    best = None if rule_only else suggest(config, cluster, factor).best
    step = plan.longest
    return {
        "model": model,
        "gpu": gpu,
        "gpus": count,
        "factor": asdict(factor),
        "rule": {
            "layout": plan.summary.layout.name,
            "micro_batch": step.batches.micro_batch,
            "accumulation": step.batches.accumulation,
            "mfu": asdict(step.mfu),
            "mean_mfu": asdict(plan.mean_mfu),
            "seconds": step.seconds.estimate,
            "exposed_seconds": step.time["exposed communication"],
            "gib": plan.peak_bucket.memory.total / 2**30,
            "fits": plan.peak_bucket.memory.fits,
        },
        "suggested": best
        and {
            "layout": best.layout.name,
            "settings": best.settings,
            "mfu": asdict(best.mfu),
            "seconds": best.seconds.estimate,
            "exposed_seconds": best.time["exposed communication"],
            "gib": best.memory.total / 2**30 if best.memory else None,
        },
    }


def cell(row: dict[str, Any]) -> str:
    rule, best = row["rule"], row["suggested"]
    low, mfu, high = (rule["mfu"][name] for name in ("low", "estimate", "high"))
    words = f"{mfu:.1%} ({low:.0%} to {high:.0%})" if rule["fits"] else "does not fit"
    words += f", {rule['micro_batch']} x {rule['accumulation']}"
    if best and (not rule["fits"] or best["mfu"]["estimate"] > mfu + NOTEWORTHY):
        kind, training = (best["settings"][each] for each in ("activation_checkpoint", "training"))
        words += f"; {best['mfu']['estimate']:.1%} by {best['layout']}, {kind['mode']}, "
        words += f"micro-batch {training['max_local_batch_size']}"
    return words.replace("%", " %")


def table(rows: list[dict[str, Any]]) -> list[str]:
    known = {(each["model"], each["gpu"], each["gpus"]): each for each in rows}
    lines = [f"| model, GPUs | {' | '.join(GPUS)} |", "|---" * (1 + len(GPUS)) + "|"]
    for model in MODELS:
        for count in COUNTS:
            cells = [known.get((model, gpu, count)) for gpu in GPUS]
            texts = [cell(each) if each else "" for each in cells]
            lines.append(f"| {model.upper()}, {count} | {' | '.join(texts)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--gpu", nargs="+", default=GPUS, choices=GPUS)
    parser.add_argument("--gpus", nargs="+", default=COUNTS, type=int)
    parser.add_argument("--rule-only", action="store_true", help="without the search of a layout")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    quiet_known_warnings()
    remember_passes()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    known = {(each["model"], each["gpu"], each["gpus"]): each for each in rows}
    for model in options.models:
        for gpu in options.gpu:
            for count in options.gpus:
                known[model, gpu, count] = row(model, gpu, count, options.rule_only)
                rows = [known[key] for key in sorted(known)]
                write_atomic(options.out, json.dumps({"rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
