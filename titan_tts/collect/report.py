"""What a collection holds and cost: one table on stdout, and report.html."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_tts.collect.folder import FILES, is_complete, read_record, read_seconds
from titan_tts.collect.queue import Queue
from titan_tts.html import page_template
from titan_tts.tables import aligned
from torchtitan.models.dit_tts.files import write_atomic

REPORT_NAME = "report.html"
_SHOWN_SPEAKERS = 50
_ON_STDOUT = 3  # tables

_Rows = Sequence[tuple[str, ...]]
Table = tuple[str, tuple[str, ...], _Rows]
"""Title, header, rows"""


@dataclass(frozen=True)
class Report:
    """Of the recordings that the collection is made of."""

    figures: dict[str, str]
    tables: list[Table]
    failed: int

    def lines(self) -> list[str]:
        shown = [table for table in self.tables[:_ON_STDOUT] if table[2]]
        parts: list[_Rows] = [[*self.figures.items()]]
        parts += [[header, *rows] for _, header, rows in shown]
        return [line for part in parts for line in ["", *aligned(part)]]


def summarize(output: Path, rows: Sequence[Mapping[str, Any]], queue: Queue) -> Report:
    """Hours are of audio."""
    record = read_record(output)
    names = record["files"]
    complete = [file for file in names if is_complete(output, file)]
    jobs = {file: row for file, row in queue.jobs().items() if file in names}
    # Of what was acknowledged by who analyzed it: the work of killed ones is not in it.
    analyzed = sum(row.seconds for row in jobs.values()) / 3600
    stages: Counter[str] = Counter()
    for job in jobs.values():
        stages.update(job.stages)
    agreements = [row["agreement"] for row in rows if row["agreement"] is not None]
    speakers = _parts(rows, "speaker")
    failed = [(f"{names[id]}: {job.message}",) for id, job in jobs.items() if job.state == "dead"]
    without = len({*complete} - {row["id"].partition("-")[0] for row in rows})
    hours_in = sum(read_seconds(output / FILES / file) for file in complete) / 3600
    figures = {
        "recordings": f"{len(complete):,} of {len(names):,}",
        "without a segment": f"{without:,}",
        "hours in": f"{hours_in:.2f}",
        "hours kept": f"{sum(map(_hours, rows)):.2f}",
        "segments": f"{len(rows):,}",
        "annotated": f"{sum(bool(row.get('annotated')) for row in rows):,}",
        "speakers": f"{len(speakers):,}",
        "agreement": f"{sum(agreements) / len(agreements):.1%}" if agreements else "not measured",
        "failed": f"{len(failed):,}",
    }
    costs = [(stage, f"{seconds / analyzed:,.1f}") for stage, seconds in stages.items()]
    settings = [(name, str(value)) for name, value in record["settings"].items()]
    parts = "segments", "hours"
    tables: list[Table] = [
        ("Failed", ("failed (--retry-dead tries again)",), failed),
        ("Quality", ("quality", *parts), _parts(rows, "quality")),
        ("Cost", ("stage", "seconds of one worker per hour of audio"), costs),
        ("Speakers with the most speech", ("name", *parts), speakers[:_SHOWN_SPEAKERS]),
        ("Settings", ("name", "value"), settings),
    ]
    return Report(figures, tables, len(failed))


def _parts(rows: Sequence[Mapping[str, Any]], column: str) -> _Rows:
    """(value of the column, segments, hours), the most hours first."""
    segments, hours = Counter[str](), Counter[str]()
    for row in rows:
        segments[row[column]] += 1
        hours[row[column]] += _hours(row)
    return [(value, f"{segments[value]:,}", f"{each:.2f}") for value, each in hours.most_common()]


def _hours(row: Mapping[str, Any]) -> Any:
    return (row["stop"] - row["start"]) / 3600


def write_page(output: Path, report: Report) -> None:
    template = page_template(__package__, "report.html.jinja", {})
    page = template.render(title=output.name, report=report)
    write_atomic(output / REPORT_NAME, page.encode("utf-8", "backslashreplace"))
