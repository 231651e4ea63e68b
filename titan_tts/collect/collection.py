"""collection.jsonl: the segments of all files as one manifest for `titan-tts prepare`, with speakers over all files,
weights, and what annotators decided. It is made from files/ and may be made again at any time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.annotate.store import annotations
from titan_tts.collect.folder import (
    FILES,
    as_lines,
    check_ids,
    is_complete,
    read_lines,
    read_record,
    read_recording,
)
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.files import write_atomic

COLLECTION_NAME = "collection.jsonl"
_EDITED = {"annotated", "annotator", "text", "text_verbatim"}


def write_collection(output: Path) -> list[dict[str, Any]]:
    """Makes OUTPUT/collection.jsonl; returns its rows, sorted by id.

    Speakers keep the names that they have in an earlier collection.jsonl. Rejected segments take part in finding the
    speakers, so that these do not change with every judgement.
    """
    made_of = read_record(output)
    rows: list[dict[str, Any]] = []
    vectors, owners = [], []
    for number, (file, name) in enumerate(sorted(made_of["files"].items())):
        if is_complete(output, file):
            records, embeddings = read_recording(output / FILES / file, file)
            rows += [record | {"source": name} for record in records]
            if records:
                vectors.append(embeddings)
                owners += [number] * len(records)
    sizes = {each.shape[1] for each in vectors}
    require(
        len(sizes) <= 1,
        f"{output}: its embeddings have the sizes {sizes}; they must be of one encoder",
    )
    path = output / COLLECTION_NAME
    known = _speakers(path)
    labels, similarity = _clusters(
        np.concatenate(vectors) if vectors else np.zeros((0, 1), np.float32),
        np.array(owners, np.int64),
        made_of["settings"]["speaker_threshold"],
        np.array([known.get(row["id"], 0) for row in rows], np.int64),
    )
    for row, label, cosine in zip(rows, labels, similarity, strict=True):
        row |= {"speaker": f"s{label:04d}", "speaker_similarity": round(float(cosine), 4)}
    rows = edited(rows, annotations(output))
    for row, weight in zip(rows, _weights(rows), strict=True):
        row["weight"] = round(float(weight), 6)
    check_ids(rows)
    rows.sort(key=lambda row: row["id"])
    write_atomic(path, as_lines(rows))
    return rows


def _clusters(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    from titan_tts.collect.speakers import cluster  # imports torch

    return cluster(*arguments)


def _weights(rows: list[dict[str, Any]]) -> np.ndarray:
    from titan_tts.collect.quality import speaker_weights

    return speaker_weights(np.array([row["speaker"] for row in rows]))


def _speakers(path: Path) -> dict[str, int]:
    """{segment: number of its speaker} in an earlier collection.jsonl."""
    if not path.exists():
        return {}
    return {row["id"]: int(row["speaker"][1:]) for row in read_lines(path)}


def edited(
    rows: list[dict[str, Any]], edits: Mapping[str, dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """The rows with what annotators changed, by id and without the rejected ones. Edits of segments that are not there
    any more, as their file was edited, are left out."""
    kept = []
    for row in rows:
        edit = edits.get(row["id"], {})
        if edit is not None:
            assert edit.keys() <= _EDITED, edit.keys()
            kept.append(row | edit)
    return kept
