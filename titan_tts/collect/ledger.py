"""What is known of a collection's sources and failures: two journals in OUTPUT, which one process writes.

    sources.jsonl   path or URL -> its name in SOURCE, size, version, and FILE_ID of its content
    jobs.jsonl      FILE_ID -> the attempts that failed, and the last reason

A job is one content. It is done once its folder is there, and dead after so many failed attempts.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from titan_tts.collect.folder import is_complete
from titan_tts.jobs.workspace import Journal

SOURCES_NAME, JOBS_NAME = "sources.jsonl", "jobs.jsonl"


class Source(NamedTuple):
    """A path or URL that was read, and the content that it had."""

    path: str
    name: str  # relative to the command's SOURCE
    size: int  # bytes
    version: int  # changes with the content, as of `data.storage.ShardFile`; 0: unknown
    file: str  # id of the content: a job's


class JobRow(NamedTuple):
    """How a job stands, and why its last attempt failed."""

    state: str  # "pending", "done" or "dead"
    attempts: int
    reason: str


class Ledger:
    """Sources and jobs of one collected folder."""

    def __init__(self, output: Path, max_attempts: int = 3):
        self._output, self._max_attempts = output, max_attempts
        self._sources = Journal(output / SOURCES_NAME)
        self._jobs = Journal(output / JOBS_NAME)

    def put_source(self, source: Source) -> None:
        """Remembers a path with its content; an earlier content of the path is forgotten."""
        values = source._asdict()
        self._sources.note(values.pop("path"), **values)

    def forget_sources(self, paths: Iterable[str]) -> None:
        self._sources.forget(paths)

    def sources(self) -> dict[str, Source]:
        """{path: source}, sorted by path."""
        return {path: Source(path, **row) for path, row in sorted(self._sources.rows().items())}

    def jobs(self) -> dict[str, JobRow]:
        """{FILE_ID: row} of all contents that a source has, sorted by id."""
        noted, found = self._jobs.rows(), {}
        for file in sorted({source.file for source in self.sources().values()}):
            row = noted.get(file, {})
            attempts = row.get("attempts", 0)
            state = "dead" if attempts >= self._max_attempts else "pending"
            state = "done" if is_complete(self._output, file) else state
            found[file] = JobRow(state, attempts, row.get("reason", ""))
        return found

    def fail(self, file: str, attempts: int, reason: str) -> None:
        """Notes that `attempts` have failed, the last one for this reason."""
        self._jobs.note(file, attempts=attempts, reason=reason)
