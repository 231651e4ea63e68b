"""What a collection holds and cost, on a terminal and in report.html, with the least certain texts to hear."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_tts.collect.folder import FILES, is_complete, read_record, read_seconds
from titan_tts.collect.queue import Queue
from titan_tts.report.page import Audio, Note, Page, Section, Sound, Table
from titan_tts.report.sound import data_url
from torchtitan.models.dit_tts.bounded import read_bytes

REPORT_NAME = "report.html"
_SHOWN_SPEAKERS = 50
_SHOWN_SEGMENTS, _SHOWN_BYTES = 24, 16 * 2**20

_Rows = Sequence[tuple[str, ...]]


def collection_page(output: Path, rows: Sequence[Mapping[str, Any]], queue: Queue) -> Page:
    """The page of the recordings that the collection is made of. Hours are of audio."""
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
    head = ("segments", "hours")
    heard = [*_heard(output, rows)]
    said = f"{len(heard)} of {len(rows):,}, the least agreement of both recognizers first; all are in {FILES}/."
    return Page(
        output.name,
        [
            Table(("failed (--retry-dead tries again)",), failed),
            Table(("quality", *head), _parts(rows, "quality"), "Quality"),
            Table(("stage", "seconds of one worker per hour of audio"), costs, "Cost"),
            Table(
                ("name", *head),
                speakers,
                "Speakers with the most speech",
                max_rows=_SHOWN_SPEAKERS,
                on_terminal=0,
            ),
            Section("Segments to hear", [Note(said), *heard] if heard else [], False),
            Table((), settings, "Settings", (0, 1), on_terminal=0),
        ],
        cards=figures,
        about="Collected by titan-tts collect",
        generator="titan-tts collect",
    )


def _heard(output: Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[Audio]:
    """The segments whose texts agree least, as many as are not too large."""
    worst = sorted(
        rows, key=lambda row: (row["agreement"] is None, row["agreement"] or 0.0, row["id"])
    )
    size = 0
    for row in worst[:_SHOWN_SEGMENTS]:
        size += (own := (output / row["audio"]).stat().st_size)
        if size > _SHOWN_BYTES:
            size -= own
            continue
        start, stop, agreement = row["start"], row["stop"], row["agreement"]
        facts = [] if agreement is None else [f"agreement {agreement:.0%}"]
        facts += [f"quality {row['quality']}", f"{row['source']} at {start:.1f} s"]
        if (verbatim := row["text_verbatim"]) and verbatim != row["text"]:
            facts.append(f"verbatim: {verbatim}")
        sound = Sound(
            row["speaker"], stop - start, data_url("audio/flac", read_bytes(output / row["audio"]))
        )
        yield Audio(row["text"], ", ".join(facts), [sound])


def _parts(rows: Sequence[Mapping[str, Any]], column: str) -> _Rows:
    """(value of the column, segments, hours), the most hours first."""
    segments, hours = Counter[str](), Counter[str]()
    for row in rows:
        segments[row[column]] += 1
        hours[row[column]] += _hours(row)
    return [(value, f"{segments[value]:,}", f"{each:.2f}") for value, each in hours.most_common()]


def _hours(row: Mapping[str, Any]) -> Any:
    return (row["stop"] - row["start"]) / 3600
