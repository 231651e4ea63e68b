"""Stage: utterances of mixed lengths in packed rows and in buckets, against all of full length.

Goodput counts the FLOPs of real lengths only. An ideal packed stream would have no padding and the full-length
step's rate, so the ratio of the goodput rate to that rate is the fraction of an ideal stream's goodput.
"""

from functools import partial
from typing import Any

from tools.gpu_check.items import Item, Values
from tools.gpu_check.settings import Settings
from tools.gpu_check.steps import figures
from tools.gpu_check.train_runs import benchmark

_MICRO_BATCH = {"debug": 4, "800M": 32, "3B": 8, "8B": 1}
_BUCKETS = 8
"""as in the configs"""

_LEAST_SECONDS = {"packed rows": 50.0, f"{_BUCKETS} buckets": 100.0}
"""start, compile, warm-up and timed steps"""


def goodput_tflops(report: dict[str, Any]) -> float:
    return next(
        row["tflops_per_device"]
        for row in report["conventions"]
        if row["convention"] == "exact goodput"
    )


def mixed(flavor: str, batching: str, settings: Settings) -> Values:
    """The mixed run's figures, and its goodput over the full-length run's rate."""
    size = _MICRO_BATCH[flavor]
    keys = [f"--data.num_buckets={_BUCKETS}"]
    if batching == "packed rows":
        keys = ["--data.batching=packed", f"--data.longest_per_row={min(4, size)}"]
    longest = benchmark(settings, flavor, size, "longest", [])
    report = benchmark(settings, flavor, size, "mixed", keys)
    return {
        "fraction_of_packed_goodput": goodput_tflops(report) / longest["tflops_per_device"],
        "goodput_tflops": goodput_tflops(report),
        "full_length_tflops": longest["tflops_per_device"],
        **figures(report),
    }


def items(settings: Settings) -> list[Item]:
    flavor = settings.flavors[0]
    return [
        Item(
            f"{flavor} mixed lengths, {batching}",
            partial(mixed, flavor, batching, settings),
            3.0 if settings.tiny else least,
        )
        for batching, least in _LEAST_SECONDS.items()
    ]
