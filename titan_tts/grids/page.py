"""The HTML page of an analysis: one file with its styles, tables and plots inside, and no network."""

from collections.abc import Sequence
from typing import Any

from titan_tts.grids.drawing import label
from titan_tts.grids.effects import Noise
from titan_tts.grids.runs import FIGURES
from titan_tts.grids.verdicts import WITHOUT_REPEATS
from titan_tts.html import counted, page_template

MAX_LISTED = 30
"""Rows of a table that may be long; summary.json has all."""

UNITS = {
    "seconds_per_step": "s/step",
    "samples_per_second": "samples/s",
    "audio_seconds_per_second": "seconds of audio per second",
    "tokens_per_second_per_device": "tokens/s per device",
    "mfu": "MFU %",
    "goodput_mfu": "goodput MFU %",
    "hfu": "HFU %",
    "tflops_per_device": "TFLOP/s per device",
    "peak_allocated_gib": "allocated GiB",
    "peak_reserved_gib": "reserved GiB",
    "loss": "loss",
}
"""Figure -> the head of its column"""

BADGES = {
    "pass": "good",
    "completed": "good",
    "fail": "error",
    "oom": "error",
    "failed": "error",
    "unreadable": "error",
    "timeout": "error",
}


def number(value: float | None, digits: int = 4) -> str:
    """A number as people read it; None is a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def figure_text(name: str, value: float | None) -> str:
    """A figure in the unit of UNITS."""
    percent = name in ("mfu", "goodput_mfu", "hfu") and value is not None
    return number(100 * value if percent and value is not None else value)


def change(value: float | None) -> str:
    """A ratio as a change in percent: 1.093 -> +9.3 %."""
    return "-" if value is None else f"{100 * (value - 1):+.1f} %"


def span(low: float | None, high: float | None) -> str:
    """Two ratios as changes: +3.1 to +4.5 %."""
    return "-" if low is None else f"{change(low).removesuffix(' %')} to {change(high)}"


def interval(row: dict[str, Any]) -> str:
    """An estimate's interval in percent; a dash without repeats."""
    return span(row["low"], row["high"])


def verdicts(content: dict[str, Any]) -> list[dict[str, str]]:
    """Lines of the summary: verdict (pass, fail, cannot tell or note) and what it is about."""
    lines = []
    for figure, each in content["growth"].items():
        text = f"{UNITS[figure].removesuffix(' %')} does not fall with a larger batch: "
        if each["pairs"]:
            falls = len(each["falls"])
            text += (
                f"{falls} of {each['pairs']} steps to the next batch fall by more than the noise "
            )
            text += f"({100 * each['tolerance']:.1f} %"
            known = content["noise"][figure]["df"] > 0
            text += ")" if known else ", taken without repeats)"
        else:
            text += "no configuration was run at two batches"
        lines.append({"verdict": each["verdict"], "text": text})
    speed = Noise(**content["noise"]["samples_per_second"]) if content["rows"] else None
    if speed and speed.df:
        text = f"repeats differ by {100 * speed.variance**0.5:.2f} % of samples/s (standard deviation, "
        lines.append({"verdict": "note", "text": f"{text}{speed.df} degrees of freedom)"})
    elif speed:
        text = "no cell was run twice, so no effect has an interval and "
        text += f"{100 * WITHOUT_REPEATS:g} % is taken as noise"
        lines.append({"verdict": "cannot tell", "text": text})
    forecasts = content["forecasts"]
    if forecasts["tried"]:
        right = f"{forecasts['right']} of {counted(forecasts['tried'], 'run')}"
        verdict = "pass" if forecasts["right"] == forecasts["tried"] else "fail"
        text = f"the forecast whether a run fits into memory was right for {right}"
        lines.append({"verdict": verdict, "text": text})
    if compiles := content["notes"].get("compiles", {}).get("runs"):
        text = (
            f"{counted(compiles, 'run')} compiled while being timed; raise [benchmark] warmup_steps"
        )
        lines.append({"verdict": "fail", "text": text})
    return lines


def run_columns(content: dict[str, Any], runs: Sequence[dict]) -> tuple[list[str], list[str]]:
    """Factors that vary between the runs, and the figures that any has."""
    static = {"name", "folder", "grid", "source", "mfu_convention", "state", "reason", "repeat"}
    factors = [
        name
        for name in runs[0]
        if name not in static
        and name not in FIGURES
        and not name.startswith("predicted_")
        and len({row[name] for row in runs if row[name] is not None}) > 1
    ]
    return factors, [name for name in UNITS if any(row[name] is not None for row in runs)]


def render(generator: str, content: dict[str, Any], plots: dict[str, dict[str, Any]]) -> str:
    """The page.

    Args:
        generator: by which another analysis knows the page as its own.
        content: as `command.analyse` makes it.
        plots: as `plots.draw_all` makes them.
    """
    filters = {"number": number, "change": change, "interval": interval}
    template = page_template(__package__, "analysis.html.jinja", filters)
    factors, figures = run_columns(content, content["all"])
    return template.render(
        generator=generator,
        badges=BADGES,
        units=UNITS,
        max_listed=MAX_LISTED,
        label=label,
        span=span,
        figure_text=figure_text,
        verdicts=verdicts(content),
        factors=factors,
        figures=figures,
        plots=plots,
        clear=[row for row in content["interactions"] if row["excludes_1"]],
        **content,
    )
