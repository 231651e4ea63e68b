"""Stage: utterances of mixed lengths in packed rows and in buckets, against all of full length.

Goodput counts the FLOPs of real lengths only. An ideal packed stream would have no padding and the full-length
step's rate, so the ratio of the goodput rate to that rate is the fraction of an ideal stream's goodput.
Eight buckets are what the shipped configs have, and their fraction is this code's. Fewer are measured only
where the time is too short for eight compiled shapes. Without buckets every utterance is padded to the
longest.
"""

from functools import partial
from typing import Any

from tools.gpu_check.items import Item, NotMeasured, Values
from tools.gpu_check.settings import Settings
from tools.gpu_check.steps import figures
from tools.gpu_check.train_runs import benchmark

_MICRO_BATCH = {"debug": 4, "800M": 32, "3B": 8, "8B": 1}
_SHIPPED, _FEWER = 8, 4
"""buckets, a compiled shape each"""

_LEAST_SECONDS = {_SHIPPED: 100.0, _FEWER: 60.0, 1: 30.0}
"""start, compile, warm-up and timed steps"""


def goodput_tflops(report: dict[str, Any]) -> float:
    return next(
        row["tflops_per_device"]
        for row in report["conventions"]
        if row["convention"] == "exact goodput"
    )


def mixed(flavor: str, buckets: int, measured: set[int], settings: Settings) -> Values:
    """The mixed run's figures, and its goodput over the full-length run's rate.

    Args:
        measured: numbers of buckets that were measured before; takes this one.
    """
    if buckets == _FEWER and _SHIPPED in measured:
        raise NotMeasured(f"the configs' {_SHIPPED} buckets were measured")
    size = _MICRO_BATCH[flavor]
    longest = benchmark(settings, flavor, size, "longest", [])
    report = benchmark(settings, flavor, size, "mixed", [f"--data.num_buckets={buckets}"])
    measured.add(buckets)
    return _against(longest, report) | {"buckets": buckets}


def packed(flavor: str, settings: Settings) -> Values:
    """The same of packed rows."""
    size = _MICRO_BATCH[flavor]
    longest = benchmark(settings, flavor, size, "longest", [])
    keys = ["--data.batching=packed", f"--data.longest_per_row={min(4, size)}"]
    return _against(longest, benchmark(settings, flavor, size, "mixed", keys))


def _against(longest: dict[str, Any], report: dict[str, Any]) -> Values:
    return {
        "fraction_of_packed_goodput": goodput_tflops(report) / longest["tflops_per_device"],
        "goodput_tflops": goodput_tflops(report),
        "full_length_tflops": longest["tflops_per_device"],
        **figures(report),
    }


def items(settings: Settings) -> list[Item]:
    flavor = settings.flavors[0]
    measured: set[int] = set()
    said = {
        _SHIPPED: "as in the configs",
        _FEWER: f"not the configs' {_SHIPPED}",
        1: "as without any",
    }
    rows = f"{flavor} mixed lengths, packed rows"
    return [
        Item(rows, partial(packed, flavor, settings), 3.0 if settings.tiny else _LEAST_SECONDS[1])
    ] + [
        Item(
            f"{flavor} mixed lengths, buckets: {n}, {said[n]}",
            partial(mixed, flavor, n, measured, settings),
            3.0 if settings.tiny else least,
        )
        for n, least in _LEAST_SECONDS.items()
    ]
