"""What is known of a collection's sources and jobs: two journals in OUTPUT, which one process writes.

    sources.jsonl   path or URL -> its name in SOURCE, size, version, and FILE_ID of its content
    jobs.jsonl      FILE_ID -> the attempts that failed and the last reason, or what its analysis cost

A job is one content. It is done once its folder is there, and dead after so many failed attempts.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from titan_tts.collect.folder import is_complete
from titan_tts.jobs.workspace import Journal
from torchtitan.models.dit_tts.errors import reading

SOURCES_NAME, JOBS_NAME, EARLIER_NAME = "sources.jsonl", "jobs.jsonl", "queue.sqlite"


class Source(NamedTuple):
    """A path or URL that was read, and the content that it had."""

    path: str
    name: str  # relative to the command's SOURCE
    size: int  # bytes
    version: int  # changes with the content, as of `data.storage.ShardFile`; 0: unknown
    file: str  # id of the content: a job's


class JobRow(NamedTuple):
    """How a job stands: `seconds` of audio and {stage: seconds that it took} of one that was done."""

    state: str  # "pending", "done" or "dead"
    message: str
    attempts: int
    seconds: float
    stages: dict[str, float]


class Queue:
    """Jobs and sources of one collected folder."""

    def __init__(self, output: Path, max_attempts: int = 3):
        self._output, self._max_attempts = output, max_attempts
        is_new = not (output / SOURCES_NAME).exists()
        self._sources = Journal(output / SOURCES_NAME)
        self._jobs = Journal(output / JOBS_NAME)
        if is_new and (output / EARLIER_NAME).exists():
            with reading(output / EARLIER_NAME, "remove it: recordings are listed anew"):
                self._adopt(output / EARLIER_NAME)

    def _adopt(self, path: Path) -> None:
        """Takes over the queue of a version that kept it in SQLite."""
        text = [f"CAST({name} AS TEXT)" for name in ("path", "name", "file")]
        sources = f"SELECT {', '.join(text)}, CAST(size AS INTEGER), CAST(version AS INTEGER) FROM sources"
        dead = "SELECT CAST(id AS TEXT), CAST(attempts AS INTEGER), CAST(message AS TEXT) FROM jobs WHERE state = 'dead'"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            for name, attempts, message in connection.execute(dead).fetchall():
                self.fail(name, attempts, message)
            for path_of, name, file, size, version in connection.execute(sources).fetchall():
                self.put_source(Source(path_of, name, size, version, file))

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
        noted = self._jobs.rows()
        files = sorted({source.file for source in self.sources().values()})
        return {file: self._row(file, noted.get(file, {})) for file in files}

    def _row(self, file: str, noted: Mapping) -> JobRow:
        attempts = noted.get("attempts", 0)
        is_dead = attempts >= self._max_attempts
        state = "done" if is_complete(self._output, file) else "dead" if is_dead else "pending"
        cost = noted.get("seconds", 0.0), noted.get("stages", {})
        return JobRow(state, noted.get("reason", ""), attempts, *cost)

    def done(self, file: str, seconds: float, stages: Mapping[str, float]) -> None:
        self._jobs.note(file, seconds=seconds, stages=dict(stages))

    def fail(self, file: str, attempts: int, reason: str) -> None:
        """Notes that `attempts` have failed, the last one for this reason."""
        self._jobs.note(file, attempts=attempts, reason=reason)

    def forget_failures(self) -> None:
        """Lets what has failed be tried again, as if it were new."""
        self._jobs.forget([file for file, row in self.jobs().items() if row.attempts])
