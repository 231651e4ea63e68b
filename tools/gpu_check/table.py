"""The check's result as a table, and whether it passed."""

from collections import Counter

from tools.gpu_check.items import FAILED, MEASURED, PASSED, Row
from tools.gpu_check.supervisor import StageResult, minutes, short

_MOST_FIGURES = 6

_FIRST = (
    "output_error",
    "gradient_error",
    "times_eager_sdpa",
    "loss_difference",
    "bar",
    "fraction_of_packed_goodput",
    "tflops",
    "gb_per_second",
    "ms_median",
    "ms_of_kernels",
    "ms_at_90_percent_useful",
    "peak_gib",
    "kept_gib",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "seconds_per_step",
    "samples_per_second",
    "audio_seconds_per_second",
    "mfu, exact",
    "hfu",
    "mfu, 6N T",
)
"""figures that say most; others follow only where there is room, and all are in the JSON"""


def passed(results: list[StageResult]) -> bool:
    """False where a check is over its bar or anything ended in an error. What ran out of memory or time,
    or is not there to be measured, is a result."""
    return not any(row.status == FAILED for result in results for row in result.rows)


def table(results: list[StageResult]) -> str:
    """A line an item, below its stage's."""
    width = max((len(row.item) for result in results for row in result.rows), default=0)
    lines = []
    for result in results:
        counts = Counter(row.status for row in result.rows)
        found = ", ".join(f"{number} {status}" for status, number in counts.items()) or "nothing"
        lines.append(f"\n{result.name} ({minutes(result.seconds)}): {found}")
        lines += [f"  {row.item:<{width}}  {row.status:<12}  {_said(row)}" for row in result.rows]
    return "\n".join(lines)


def _said(row: Row) -> str:
    plain = {
        name: value
        for name, value in row.values.items()
        if isinstance(value, (int, float, str)) and not (isinstance(value, str) and len(value) > 40)
    }
    names = [name for name in _FIRST if name in plain]
    names += [name for name in plain if name not in _FIRST]
    chosen = names[: max(_MOST_FIGURES, sum(name in _FIRST for name in names))]
    if row.status == FAILED and row.why:
        return "; ".join(filter(None, [row.why, _figures(plain, chosen)]))
    return _figures(plain, chosen) if row.status in (MEASURED, PASSED) else row.why


def _figures(values: dict, names: list[str]) -> str:
    return ", ".join(f"{name} {short(values[name])}" for name in names)
