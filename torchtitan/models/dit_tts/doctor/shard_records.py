"""Shards against the sizes and SHA-256 digests that `titan-tts prepare` recorded beside them."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torchtitan.models.dit_tts.doctor.findings import KINDS, Example, Finding
from torchtitan.models.dit_tts.files import is_remote

RECORD_NAME = "prepare.json"
# Folders above a shard in which its record is looked for: OUTPUT/train/shard-000000.tar.
_MOST_LEVELS = 3


@dataclass(frozen=True)
class Record:
    """What one prepare.json says of a shard; 0 and "" where it does not say."""

    record_path: str
    bytes: int
    sha256: str


def find_records(tar_paths: Sequence[str]) -> tuple[dict[str, Record], list[str]]:
    """(records of the local shards that have one, listed shards that are not there).

    Only folders that hold one of ``tar_paths`` are expected to be complete, and only where all of
    their shards were asked for.
    """
    local = [path for path in tar_paths if not is_remote(path)]
    listed: dict[str, Record] = {}
    for folder in {os.path.dirname(path) for path in local}:
        listed.update(_records_above(folder))
    asked = set(local)
    complete = {
        folder
        for folder in {os.path.dirname(path) for path in local}
        if asked.issuperset(
            os.path.join(folder, name)
            for name in os.listdir(folder)
            if name.endswith(".tar") and not name.startswith(".")
        )
    }
    missing = [
        path
        for path in listed
        if path not in asked and os.path.dirname(path) in complete and not os.path.exists(path)
    ]
    return {path: listed[path] for path in local if path in listed}, sorted(missing)


def _records_above(folder: str) -> dict[str, Record]:
    """Of the nearest prepare.json at or above ``folder`` that can be read: path -> record."""
    place = folder
    for _ in range(_MOST_LEVELS):
        record_path = os.path.join(place, RECORD_NAME)
        try:
            with open(record_path, encoding="utf-8") as file:
                shards = json.load(file)["shards"]
            return {
                os.path.normpath(os.path.join(place, name)): Record(record_path, size, digest)
                for name, size, digest in _entries(shards)
            }
        except (OSError, ValueError, KeyError, TypeError):
            place = os.path.dirname(place)
    return {}


def _entries(shards: Any) -> list[tuple[str, int, str]]:
    """(name, bytes, sha256) of {name: bytes}, {name: {...}} or [{"name": ..., ...}]."""
    if isinstance(shards, dict):
        pairs = list(shards.items())
    else:
        pairs = [(entry.get("name") or entry["path"], entry) for entry in shards]
    return [
        (str(name), int(entry.get("bytes", 0)), str(entry.get("sha256", "")))
        if isinstance(entry, dict)
        else (str(name), int(entry), "")
        for name, entry in pairs
    ]


def record_findings(
    records: dict[str, Record],
    missing: Sequence[str],
    *,
    threads: int,
    with_digests: bool,
    max_examples: int,
    progress: Callable[[int], Any] = lambda count: None,
) -> tuple[list[Finding], dict[str, str]]:
    """Findings, and for each shard "same", "differs" or "size only".

    Args:
        with_digests: reads every shard whole; else only sizes are compared.
        progress: is told how many more shards are done.
    """

    def check(path: str) -> tuple[str, str]:
        record = records[path]
        found = os.path.getsize(path)
        if record.bytes and found != record.bytes:
            return "differs", f"{found} bytes where {record.record_path} says {record.bytes}"
        if not (with_digests and record.sha256):
            return "size only", ""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != record.sha256:
            return "differs", f"its SHA-256 {digest[:12]}… is not that of {record.record_path}"
        return "same", ""

    states: dict[str, str] = {}
    changed: list[Example] = []
    pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")
    try:
        for path, (state, detail) in zip(records, pool.map(check, records), strict=True):
            states[path] = state
            if state == "differs":
                changed.append(Example(path, detail))
            progress(1)
    finally:
        pool.shutdown(cancel_futures=True)
    gone = [Example(path, "listed in prepare.json, not there") for path in missing]
    findings = [
        Finding(KINDS[code], len(examples), tuple(examples[:max_examples]))
        for code, examples in (("shard_missing", gone), ("shard_changed", changed))
        if examples
    ]
    return findings, states
