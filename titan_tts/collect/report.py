"""What a collection holds and cost: one table on stdout, and report.html."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_tts.collect.folder import FILES, is_complete, read_record, read_seconds
from titan_tts.collect.queue import Queue
from titan_tts.html import page_template
from titan_tts.tables import aligned
from torchtitan.models.dit_tts.files import write_atomic

REPORT_NAME = "report.html"
LABELS = ("high", "medium", "low")
_SHOWN_SPEAKERS = 50

_Table = tuple[str, Sequence[str], Iterable[Sequence[Any]]]
"""Title, header, rows"""


def summarize(output: Path, rows: Sequence[Mapping[str, Any]], queue: Queue) -> dict[str, Any]:
    """The figures, of the files that the collection is made of. Hours are of audio."""
    names = read_record(output)["files"]
    complete = [file for file in names if is_complete(output, file)]
    jobs = {file: row for file, row in queue.jobs().items() if file in names}
    analyzed = sum(row.seconds for row in jobs.values()) / 3600
    stages: Counter[str] = Counter()
    for job in jobs.values():
        stages.update(job.stages)
    agreements = [row["agreement"] for row in rows if row["agreement"] is not None]
    speakers = _parts(rows, "speaker")
    quality = _parts(rows, "quality")
    return {
        "files": len(names),
        "complete": len(complete),
        "hours_in": sum(read_seconds(output / FILES / file) for file in complete) / 3600,
        "segments": len(rows),
        "hours_kept": sum(map(_hours, rows)),
        "annotated": sum(bool(row.get("annotated")) for row in rows),
        "speakers": dict(sorted(speakers.items(), key=lambda each: (-each[1][1], each[0]))),
        "agreement": sum(agreements) / len(agreements) if agreements else None,
        "quality": {label: quality.get(label, (0, 0.0)) for label in LABELS},
        # Of what was acknowledged by who analyzed it: the work of killed ones is not in it.
        "stages": {stage: seconds / analyzed for stage, seconds in stages.items()},
        "dead": {names[file]: row.message for file, row in jobs.items() if row.state == "dead"},
    }


def _parts(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, tuple[int, float]]:
    """{value of the column: (segments, hours)}."""
    found: dict[str, tuple[int, float]] = {}
    for row in rows:
        segments, hours = found.get(row[column], (0, 0.0))
        found[row[column]] = segments + 1, hours + _hours(row)
    return found


def _hours(row: Mapping[str, Any]) -> float:
    return (row["stop"] - row["start"]) / 3600


def _headline(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    agreement = figures["agreement"]
    return [
        ("recordings", f"{figures['complete']:,} of {figures['files']:,}"),
        ("hours in", f"{figures['hours_in']:.2f}"),
        ("hours kept", f"{figures['hours_kept']:.2f}"),
        ("segments", f"{figures['segments']:,}"),
        ("annotated", f"{figures['annotated']:,}"),
        ("speakers", f"{len(figures['speakers']):,}"),
        ("agreement", "not measured" if agreement is None else f"{agreement:.1%}"),
        ("failed", f"{len(figures['dead']):,}"),
    ]


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The table on stdout, and what failed."""
    rows = [*_headline(figures)]
    for label, (segments, hours) in figures["quality"].items():
        rows.append((f"quality {label}", f"{segments:,} segments, {hours:.2f} h"))
    for stage, seconds in figures["stages"].items():
        rows.append((f"{stage}, seconds per hour of audio", f"{seconds:,.1f}"))
    return [*aligned(rows), *(f"failed: {name}: {why}" for name, why in figures["dead"].items())]


def write_page(output: Path, figures: Mapping[str, Any]) -> None:
    shown = list(figures["speakers"].items())[:_SHOWN_SPEAKERS]
    counts = "segments", "hours"
    tables: list[_Table] = [
        ("Failed (--retry-dead tries again)", ("recording", "why"), figures["dead"].items()),
        ("Quality", ("label", *counts), _cells(figures["quality"].items())),
        (
            f"Speakers with the most speech, of {len(figures['speakers']):,}",
            ("name", *counts),
            _cells(shown),
        ),
        (
            "Cost",
            ("stage", "seconds of one worker per hour of audio"),
            [(stage, f"{seconds:,.1f}") for stage, seconds in figures["stages"].items()],
        ),
        ("Settings", ("name", "value"), read_record(output)["settings"].items()),
    ]
    template = page_template(__package__, "report.html.jinja", {})
    page = template.render(title=output.name, cards=_headline(figures), tables=tables)
    write_atomic(output / REPORT_NAME, page.encode("utf-8", "backslashreplace"))


def _cells(parts: Iterable[tuple[str, tuple[int, float]]]) -> list[tuple[str, str, str]]:
    return [(name, f"{segments:,}", f"{hours:.2f}") for name, (segments, hours) in parts]
