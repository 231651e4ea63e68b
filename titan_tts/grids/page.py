"""The HTML page of an analysis: one file with its styles, tables and plots inside, and no network."""

from collections.abc import Sequence
from typing import Any

from titan_tts.grids.drawing import UNITS, label
from titan_tts.grids.effects import Noise
from titan_tts.grids.runs import COLUMNS, FIGURES
from titan_tts.grids.verdicts import WITHOUT_REPEATS
from titan_tts.html import counted, page_template
from titan_tts.tables import number

MAX_LISTED = 30
"""Rows of a table that may be long; summary.json has all."""

BADGES = {
    **dict.fromkeys(("pass", "completed"), "good"),
    **dict.fromkeys(("fail", "oom", "failed", "unreadable", "timeout"), "error"),
}


def figure_text(name: str, value: float | None) -> str:
    """A figure in the unit of UNITS."""
    if value is not None and name in ("mfu", "goodput_mfu", "hfu"):
        value *= 100
    return number(value)


def change(value: float | None) -> str:
    """A ratio as a change in percent: 1.093 -> +9.3 %."""
    return "-" if value is None else f"{100 * (value - 1):+.1f} %"


def span(low: float | None, high: float | None) -> str:
    """Two ratios as changes: +3.1 to +4.5 %; a dash where they are not known."""
    return "-" if low is None else f"{change(low).removesuffix(' %')} to {change(high)}"


def verdicts(content: dict[str, Any]) -> list[dict[str, str]]:
    """Lines of the summary: verdict (pass, fail, cannot tell or note) and what it is about."""
    lines = []
    for figure, each in content["growth"].items():
        text = "no configuration was run at two batches"
        if each["pairs"]:
            known = "" if content["noise"][figure]["df"] else ", taken without repeats"
            text = (
                f"{len(each['falls'])} of {each['pairs']} steps to the next batch fall by more than the noise "
                f"({100 * each['tolerance']:.1f} %{known})"
            )
        name = UNITS[figure].removesuffix(" %")
        text = f"{name} does not fall with a larger batch: {text}"
        lines.append({"verdict": each["verdict"], "text": text})
    speed = Noise(**content["noise"]["samples_per_second"]) if content["rows"] else None
    if speed and speed.df:
        deviation = f"{100 * speed.variance**0.5:.2f} % of samples/s (standard deviation, "
        text = f"repeats differ by {deviation}{speed.df} degrees of freedom)"
        lines.append({"verdict": "note", "text": text})
    elif speed:
        noise = f"{100 * WITHOUT_REPEATS:g} % is taken as noise"
        text = f"no cell was run twice, so no effect has an interval and {noise}"
        lines.append({"verdict": "cannot tell", "text": text})
    forecasts = content["forecasts"]
    if forecasts["tried"]:
        right = f"{forecasts['right']} of {counted(forecasts['tried'], 'run')}"
        verdict = "pass" if forecasts["right"] == forecasts["tried"] else "fail"
        text = f"the forecast whether a run fits into memory was right for {right}"
        lines.append({"verdict": verdict, "text": text})
    if compiled := content["compiled_while_timed"]:
        runs = counted(compiled, "run")
        text = f"{runs} compiled while being timed; raise [benchmark] warmup_steps"
        lines.append({"verdict": "fail", "text": text})
    return lines


def run_columns(runs: Sequence[dict]) -> tuple[list[str], list[str]]:
    """Factors that vary between the runs, and the figures that any has."""
    factors = [
        name
        for name in runs[0]
        if name not in (*COLUMNS, *FIGURES)
        and not name.startswith("predicted_")
        and len({row[name] for row in runs if row[name] is not None}) > 1
    ]
    return factors, [name for name in UNITS if any(row[name] is not None for row in runs)]


def render(generator: str, content: dict[str, Any], plots: dict[str, dict[str, Any]]) -> str:
    """The page of `analyse`'s content and `draw_all`'s plots. Another analysis recognizes it by `generator`."""
    filters = {"number": number, "change": change}
    template = page_template(__package__, "analysis.html.jinja", filters)
    factors, figures = run_columns(content["all"])
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
        **content,
    )
