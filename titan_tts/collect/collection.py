"""collection.jsonl: the segments of all files as one manifest for `titan-tts prepare`, with speakers over all files,
and what annotators decided; and its summary, on a terminal and in report.html. Both are made from files/ and may be
made again at any time.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from titan_tts.annotate.store import annotations
from titan_tts.collect.folder import (
    AGAIN,
    FILES,
    is_complete,
    read_record,
    read_recording,
    read_seconds,
)
from titan_tts.records.json_lines import as_lines, text_lines
from titan_tts.report.page import Page, Table
from torchtitan.models.dit_tts.bounded import parse_json, read_json_file
from torchtitan.models.dit_tts.data.members import CAPTION
from torchtitan.models.dit_tts.errors import reading, require
from torchtitan.models.dit_tts.files import write_atomic

COLLECTION_NAME, SPEAKERS_NAME = "collection.jsonl", "speakers.json"
REPORT_NAME = "report.html"


def write_collection(output: Path) -> list[dict[str, Any]]:
    """Makes OUTPUT/collection.jsonl; returns its rows, sorted by id.

    Speakers keep the names that they have in speakers.json. Rejected segments take part in finding the
    speakers, so that these do not change with every judgement.
    """
    with FileLock(output / ".collection.lock"):  # `annotate` makes it, too
        return _write(output)


def known_speakers(output: Path) -> dict[str, int]:
    """{SEGMENT_ID: number of its speaker}, also of recordings that are left out now: they may come back."""
    path = output / SPEAKERS_NAME
    with reading(path, "restore it, or remove it: speakers get new names"):
        known = read_json_file(path) if path.exists() else {}
        if not all(type(number) is int and 0 <= number < 2**31 for number in known.values()):
            raise ValueError("not the numbers of speakers")
        return known


def _write(output: Path) -> list[dict[str, Any]]:
    from titan_tts.collect.speakers import cluster  # it imports torch

    made_of = read_record(output)
    rows: list[dict[str, Any]] = []
    vectors, owners, sizes = [], [], set()
    for number, (file, name) in enumerate(sorted(made_of["files"].items())):
        if is_complete(output, file):
            records, embeddings = read_recording(output / FILES / file, file)
            rows += [record | {"source": name} for record in records]
            if records:
                vectors.append(embeddings)
                sizes.add(embeddings.shape[1])
                other = f"has embeddings of another size than others ({sizes})"
                require(len(sizes) == 1, f"{output / FILES / file}: {other}; {AGAIN}")
                owners += [number] * len(records)
    known = known_speakers(output)
    labels = cluster(
        np.concatenate(vectors) if vectors else np.zeros((0, 1), np.float32),
        np.array(owners, np.int64),
        np.array([row["stop"] - row["start"] for row in rows]),
        made_of["settings"]["speaker_threshold"],
        np.array([known.get(row["id"], 0) for row in rows], np.int64),
        max(known.values(), default=0),
    )
    for row, label in zip(rows, labels, strict=True):
        row["speaker"] = f"s{label:04d}"
        known[row["id"]] = int(label)
    write_atomic(output / SPEAKERS_NAME, json.dumps(known, indent=0))
    rows = sorted(edited(rows, annotations(output)), key=lambda row: row["id"])
    rows = _with_captions(output / COLLECTION_NAME, rows)
    write_atomic(output / COLLECTION_NAME, as_lines(rows))
    return rows


def _with_captions(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with captions by their figures. One in the file that its figures do not say is a person's, and stays."""
    from titan_tts.prepare.captions import caption, thirds  # it imports torch

    def made(rows: list[dict[str, Any]]) -> list[str]:
        # `prepare` brings all to one level, so it is not said.
        figures = [row | {"loudness": None} for row in rows]
        limits = thirds(figures)
        return [caption(each, limits) for each in figures]

    with reading(path, "correct it, or remove it: captions are made anew"):
        before = [parse_json(line) for line in text_lines(str(path))] if path.exists() else []
        given = {
            row["id"]: row[CAPTION]
            for row, of_figures in zip(before, made(before), strict=True)
            if isinstance(row.get(CAPTION), str) and row[CAPTION] != of_figures
        }
    return [
        row | {CAPTION: given.get(row["id"], each)}
        for row, each in zip(rows, made(rows), strict=True)
    ]


def edited(
    rows: list[dict[str, Any]], edits: Mapping[str, dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """The rows with what annotators changed, by id and without the rejected ones. Edits of segments that are not there
    any more, as their file was edited, are left out."""
    kept = ((row, edits.get(row["id"], {})) for row in rows)
    return [_measured_again(row | edit) if edit else row for row, edit in kept if edit is not None]


def _measured_again(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the figures of its text anew, which a person has confirmed: that is an agreement of 1."""
    from titan_tts.collect.quality import quality

    rate = len(row["text"]) / (row["stop"] - row["start"])
    label = quality(row | {"agreement": 1.0, "chars_per_second": rate})
    return row | {"agreement": None, "chars_per_second": round(rate, 2), "quality": label}


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
