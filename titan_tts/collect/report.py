"""Summary of a collection, on a terminal and in report.html."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_tts.collect.folder import FILES, is_complete, read_record, read_seconds
from titan_tts.report.page import Page, Table

REPORT_NAME = "report.html"


def collection_page(
    output: Path, rows: Sequence[Mapping[str, Any]], failures: Mapping[str, str]
) -> Page:
    """The page of the recordings that the collection is made of. Hours are of audio; `failures`: {name: reason}."""
    record = read_record(output)
    complete = [file for file in record["files"] if is_complete(output, file)]
    agreements = [row["agreement"] for row in rows if row["agreement"] is not None]
    speakers = _parts(rows, "speaker")
    without = len({*complete} - {row["id"].partition("-")[0] for row in rows})
    hours_in = sum(read_seconds(output / FILES / file) for file in complete) / 3600
    figures = {
        "recordings": f"{len(complete):,} of {len(record['files']):,}",
        "without a segment": f"{without:,}",
        "hours in": f"{hours_in:.2f}",
        "hours kept": f"{sum(map(_hours, rows)):.2f}",
        "segments": f"{len(rows):,}",
        "annotated": f"{sum(bool(row.get('annotated')) for row in rows):,}",
        "speakers": f"{len(speakers):,}",
        "agreement": f"{sum(agreements) / len(agreements):.1%}" if agreements else "not measured",
        "failed": f"{len(failures):,}",
    }
    failed = [(f"{name}: {reason}",) for name, reason in sorted(failures.items())]
    return Page(
        output.name,
        [
            Table(("failed (the same command tries again)",), failed),
            Table(("quality", "segments", "hours"), _parts(rows, "quality"), "Quality"),
            Table(("name", "segments", "hours"), speakers, "Speakers", on_terminal=0),
        ],
        cards=figures,
        about="Collected by titan-tts collect",
        generator="titan-tts collect",
    )


def _parts(rows: Sequence[Mapping[str, Any]], column: str) -> list[tuple[str, str, str]]:
    """(value of the column, segments, hours), the most hours first."""
    segments, hours = Counter[str](), Counter[str]()
    for row in rows:
        segments[row[column]] += 1
        hours[row[column]] += _hours(row)
    return [(value, f"{segments[value]:,}", f"{each:.2f}") for value, each in hours.most_common()]


def _hours(row: Mapping[str, Any]) -> Any:
    return (row["stop"] - row["start"]) / 3600
