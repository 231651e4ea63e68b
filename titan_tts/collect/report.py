"""What a collection holds and cost: one table on stdout, and report.html."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_tts.collect.folder import FILES, is_complete, read_facts, read_record
from titan_tts.collect.queue import Queue
from titan_tts.html import page_template
from titan_tts.tables import aligned
from torchtitan.models.dit_tts.files import write_atomic

REPORT_NAME = "report.html"
GENERATOR = "titan-tts collect"
LABELS = ("high", "medium", "low")
_SHOWN_SPEAKERS = 50


def summarize(output: Path, rows: Sequence[Mapping[str, Any]], queue: Queue) -> dict[str, Any]:
    """The figures, of the files that the collection is made of. Hours are of audio."""
    names = read_record(output)["files"]
    complete = [file for file in names if is_complete(output, file)]
    analyzed, stages = 0.0, Counter[str]()
    for file, (seconds, of_stages) in queue.stages().items():
        if file in names:
            analyzed += seconds / 3600
            stages.update(of_stages)
    agreements = [row["agreement"] for row in rows if row["agreement"] is not None]
    speakers: dict[str, list[float]] = {}
    for row in rows:
        speakers.setdefault(row["speaker"], []).append(_hours(row))
    return {
        "files": len(names),
        "complete": len(complete),
        "hours_in": sum(read_facts(output / FILES / file)["seconds"] for file in complete) / 3600,
        "segments": len(rows),
        "hours_kept": sum(map(_hours, rows)),
        "annotated": sum(bool(row.get("annotated")) for row in rows),
        "speakers": {
            name: {"segments": len(hours), "hours": sum(hours)}
            for name, hours in sorted(speakers.items(), key=lambda item: -sum(item[1]))
        },
        "agreement": sum(agreements) / len(agreements) if agreements else None,
        "quality": {
            label: {
                "segments": sum(row["quality"] == label for row in rows),
                "hours": sum(_hours(row) for row in rows if row["quality"] == label),
            }
            for label in LABELS
        },
        # Of what was acknowledged by who analyzed it: a few killed ones are not in it.
        "stages": {stage: seconds / analyzed for stage, seconds in stages.items()},
        "dead": {names[file]: why for file, why in queue.dead().items() if file in names},
    }


def _hours(row: Mapping[str, Any]) -> float:
    return (row["stop"] - row["start"]) / 3600


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The table on stdout."""
    rows = [
        ("recordings", f"{figures['complete']:,} of {figures['files']:,}"),
        ("hours in", f"{figures['hours_in']:.2f}"),
        ("segments", f"{figures['segments']:,}"),
        ("hours kept", f"{figures['hours_kept']:.2f}"),
        ("annotated", f"{figures['annotated']:,}"),
        ("speakers", f"{len(figures['speakers']):,}"),
        ("agreement of the recognizers", _percent(figures["agreement"])),
        *(
            (f"quality {label}", f"{each['segments']:,} segments, {each['hours']:.2f} h")
            for label, each in figures["quality"].items()
        ),
        *(
            (f"{stage}, seconds per hour of audio", f"{seconds:,.1f}")
            for stage, seconds in figures["stages"].items()
        ),
        ("failed", f"{len(figures['dead']):,}"),
    ]
    return [*aligned(rows), *(f"  {name}: {why}" for name, why in figures["dead"].items())]


def _percent(fraction: float | None) -> str:
    return "not measured" if fraction is None else f"{fraction:.1%}"


def write_page(output: Path, figures: Mapping[str, Any]) -> None:
    template = page_template(__package__, "report.html.jinja", {"percent": _percent})
    page = template.render(
        generator=GENERATOR,
        title=output.name,
        shown=_SHOWN_SPEAKERS,
        made_of=read_record(output),
        **figures,
    )
    write_atomic(output / REPORT_NAME, page.encode("utf-8", "backslashreplace"))
