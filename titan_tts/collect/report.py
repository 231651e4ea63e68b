"""What a collection holds, on a terminal and in report.html, with the least certain texts to hear."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_tts.collect.folder import FILES, is_complete, read_record, read_seconds
from titan_tts.collect.ledger import Ledger
from titan_tts.report.page import Audio, Note, Page, Section, Sound, Table
from titan_tts.report.sound import data_url
from torchtitan.models.dit_tts.bounded import read_bytes

REPORT_NAME = "report.html"
_SHOWN_SPEAKERS = 50
_SHOWN_SEGMENTS, _SHOWN_BYTES = 24, 16 * 2**20


def collection_page(output: Path, rows: Sequence[Mapping[str, Any]], ledger: Ledger) -> Page:
    """The page of the recordings that the collection is made of. Hours are of audio."""
    record = read_record(output)
    names = record["files"]
    complete = [file for file in names if is_complete(output, file)]
    agreements = [row["agreement"] for row in rows if row["agreement"] is not None]
    speakers = _parts(rows, "speaker")
    jobs = ledger.jobs().items()
    failed = [(f"{names[file]}: {job.reason}",) for file, job in jobs if job.state == "dead"]
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
    settings = [(name, str(value)) for name, value in record["settings"].items()]
    head, most = ("segments", "hours"), "Speakers with the most speech"
    heard = [*_heard(output, rows)]
    said = f"{len(heard)} of {len(rows):,}, the least agreement of both recognizers first; all are in {FILES}/."
    return Page(
        output.name,
        [
            Table(("failed (more --attempts try again)",), failed),
            Table(("quality", *head), _parts(rows, "quality"), "Quality"),
            Table(("name", *head), speakers, most, max_rows=_SHOWN_SPEAKERS, on_terminal=0),
            Section("Segments to hear", [Note(said), *heard] if heard else [], False),
            Table((), settings, "Settings", (0, 1), on_terminal=0),
        ],
        cards=figures,
        about="Collected by titan-tts collect",
        generator="titan-tts collect",
    )


def _heard(output: Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[Audio]:
    """The segments whose texts agree least, as many as are not too large."""

    def agreed(row: Mapping[str, Any]) -> tuple:
        return row["agreement"] is None, row["agreement"] or 0.0, row["id"]

    size = 0
    for row in sorted(rows, key=agreed)[:_SHOWN_SEGMENTS]:
        audio = output / row["audio"]
        if size + audio.stat().st_size > _SHOWN_BYTES:
            continue
        size += audio.stat().st_size
        facts = [f"quality {row['quality']}", f"{row['source']} at {row['start']:.1f} s"]
        if row["agreement"] is not None:
            facts.insert(0, f"agreement {row['agreement']:.0%}")
        if (verbatim := row["text_verbatim"]) and verbatim != row["text"]:
            facts.append(f"verbatim: {verbatim}")
        url = data_url("audio/flac", read_bytes(audio))
        sound = Sound(row["speaker"], row["stop"] - row["start"], url)
        yield Audio(row["text"], ", ".join(facts), [sound])


def _parts(rows: Sequence[Mapping[str, Any]], column: str) -> list[tuple[str, str, str]]:
    """(value of the column, segments, hours), the most hours first."""
    segments, hours = Counter[str](), Counter[str]()
    for row in rows:
        segments[row[column]] += 1
        hours[row[column]] += _hours(row)
    return [(value, f"{segments[value]:,}", f"{each:.2f}") for value, each in hours.most_common()]


def _hours(row: Mapping[str, Any]) -> Any:
    return (row["stop"] - row["start"]) / 3600
