"""Stage: utterances of mixed lengths in buckets, against all of full length.

Goodput counts the FLOPs of real lengths only. A packed stream would have no padding and the full-length
step's rate, so the ratio of the goodput rate to that rate is the share of a packed stream's goodput.
Without buckets every utterance is padded to the longest.
"""

from functools import partial
from typing import Any

from benchmarks.gpu_check.items import Item, Values
from benchmarks.gpu_check.settings import Settings
from benchmarks.gpu_check.steps import figures
from benchmarks.gpu_check.train_runs import benchmark

_MICRO_BATCH = {"debug": 4, "800M": 32, "3B": 8, "8B": 1}
_BUCKETS = 4
"""a compiled shape each: more would take longer than the stage has"""


def goodput_tflops(report: dict[str, Any]) -> float:
    return next(
        row["tflops_per_device"] for row in report["conventions"] if row["convention"] == "exact goodput"
    )


def mixed(flavor: str, buckets: int, settings: Settings) -> Values:
    """The mixed run's figures, and its goodput over the full-length run's rate."""
    size = _MICRO_BATCH[flavor]
    longest = benchmark(settings, flavor, size, "longest", [])
    report = benchmark(settings, flavor, size, "mixed", [f"--data.num_buckets={buckets}"])
    return {
        "share_of_packed_goodput": goodput_tflops(report) / longest["tflops_per_device"],
        "goodput_tflops": goodput_tflops(report),
        "full_length_tflops": longest["tflops_per_device"],
        "buckets": buckets,
        **figures(report),
    }


def items(settings: Settings) -> list[Item]:
    flavor = settings.flavors[0]
    least = 3.0 if settings.tiny else 25.0
    return [
        Item(f"{flavor} mixed lengths, buckets: {n}", partial(mixed, flavor, n, settings), least)
        for n in (_BUCKETS, 1)
    ]
