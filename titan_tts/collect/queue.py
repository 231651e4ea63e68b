"""A queue of jobs that cannot lose one: in a file of SQLite for one machine, in PostgreSQL for many.

    pending -> claimed -> done
                       -> pending   failed, or its worker is silent for longer than its lease
                       -> dead      the same after the last attempt

A job is one source file, named by the hash of its content. Each claim has a token of its own: a worker that has
lost its claim to another can neither renew nor acknowledge it. Both engines run the same statements.
"""

import json
import re
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.models.dit_tts.errors import InputError, first_line, require

STATES = ("pending", "claimed", "done", "dead")
QUEUE_NAME = "queue.sqlite"
_WAIT_SECONDS = 60  # for another process's transaction
_CONNECT_SECONDS = 15

Execute = Callable[..., list[tuple]]
"""execute(statement, *values): the rows that it returns"""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, size BIGINT NOT NULL, state TEXT NOT NULL,"
    " attempts INTEGER NOT NULL DEFAULT 0, token TEXT NOT NULL DEFAULT '', worker TEXT NOT NULL DEFAULT '',"
    " expires DOUBLE PRECISION NOT NULL DEFAULT 0, progress TEXT NOT NULL DEFAULT '',"
    " message TEXT NOT NULL DEFAULT '', seconds DOUBLE PRECISION NOT NULL DEFAULT 0, stages TEXT NOT NULL DEFAULT '{}')",
    "CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, attempts, size)",
    "CREATE TABLE IF NOT EXISTS sources (path TEXT PRIMARY KEY, name TEXT NOT NULL, size BIGINT NOT NULL,"
    " version BIGINT NOT NULL, file TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS sources_by_file ON sources (file)",
)
_FAILED = "state = CASE WHEN attempts < ? THEN 'pending' ELSE 'dead' END, token = '', message = ?"
_SILENT = (
    "its worker ended or was silent during every attempt; it may need more memory than there is"
)


class LostClaim(Exception):
    """Another worker has the job, as this one was silent for longer than its lease."""


class Claim(NamedTuple):
    """A worker's right to a job."""

    id: str
    token: str


class Source(NamedTuple):
    """A path or URL that was read, and the content that it had."""

    path: str
    name: str  # relative to the command's SOURCE
    size: int  # bytes
    version: int  # changes with the content, as of `data.storage.ShardFile`; 0: unknown
    file: str  # id of the content: a job's


class JobRow(NamedTuple):
    """Of the last attempt: its claim, how far it was, why it failed; and what it was acknowledged with."""

    state: str
    token: str
    progress: str
    message: str
    seconds: float
    stages: dict[str, float]


class Queue:
    """Jobs and sources of one collected folder. A connection is one thread's and one process's.

    An engine connects, and brings what differs in SQL: its clock in seconds since 1970, one for all machines; what keeps
    two claims that run at once off the same row; how a transaction begins; and the mark of a value.
    """

    now: str
    lock_rows: str
    begin: str
    mark: str
    error: type[Exception]

    def __init__(
        self, connect: Callable[[], Any], name: str, advice: str, max_attempts: int, *first: str
    ):
        """`name` and `advice` are for messages; `first`: statements before the tables are made where they are missing."""
        self._name, self._advice, self.max_attempts = name, advice, max_attempts
        with self._in_a_sentence():
            self._connection = connect()
        with self.transaction() as execute:
            for statement in (*first, *_SCHEMA):
                execute(statement)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[Execute]:
        """Statements that become visible together or, after an exception, not at all."""

        def execute(statement: str, *values: Any) -> list[tuple]:
            cursor = self._connection.execute(statement.replace("?", self.mark), values)
            return cursor.fetchall() if cursor.description else []

        with self._in_a_sentence():
            execute(self.begin)
            try:
                yield execute
            except BaseException:
                with suppress(self.error):  # a full disk or a lost connection has ended it already
                    execute("ROLLBACK")
                raise
            execute("COMMIT")

    @contextmanager
    def _in_a_sentence(self) -> Iterator[None]:
        try:
            yield
        except self.error as error:
            raise InputError(
                f"{self._name}: the queue cannot be used ({first_line(error)}); {self._advice}; start again, finished work "
                "is kept"
            ) from error

    def add(self, jobs: Iterable[tuple[str, int]]) -> int:
        """Adds jobs (id, bytes) that are not there in any state; returns how many."""
        statement = "INSERT INTO jobs (id, size, state) VALUES (?, ?, 'pending')"
        statement += " ON CONFLICT (id) DO NOTHING RETURNING id"
        with self.transaction() as execute:
            return sum(len(execute(statement, *job)) for job in jobs)

    def claim(self, worker: str, lease_seconds: float) -> Claim | None:
        """The next job: those never tried come first, of these the largest; None where none is free."""
        token = uuid.uuid4().hex
        expired = f"state = 'claimed' AND expires <= {self.now}"
        with self.transaction() as execute:
            # A worker that was killed has made an attempt: what kills it must not be tried for ever.
            execute(
                f"UPDATE jobs SET state = 'dead', token = '', message = ? WHERE id IN (SELECT id FROM jobs"
                f" WHERE {expired} AND attempts >= ? {self.lock_rows})",
                _SILENT,
                self.max_attempts,
            )
            rows = execute(
                f"UPDATE jobs SET state = 'claimed', attempts = attempts + 1, token = ?, worker = ?,"
                f" progress = '', expires = {self.now} + ? WHERE id = (SELECT id FROM jobs"
                f" WHERE state = 'pending' OR ({expired}) ORDER BY attempts, size DESC, id LIMIT 1"
                f" {self.lock_rows}) RETURNING id",
                token,
                worker,
                lease_seconds,
            )
        return Claim(rows[0][0], token) if rows else None

    def heartbeat(self, claim: Claim, lease_seconds: float, progress: str = "") -> None:
        """Renews the lease. Raises LostClaim, as do `done` and `fail`."""
        self._of_claim(claim, f"expires = {self.now} + ?, progress = ?", lease_seconds, progress)

    def done(self, claim: Claim, seconds: float, stages: Mapping[str, float]) -> None:
        """With the seconds of audio that were analyzed, and {stage: seconds that it took}."""
        values = "state = 'done', token = '', message = '', seconds = ?, stages = ?"
        self._of_claim(claim, values, seconds, json.dumps(stages))

    def fail(self, claim: Claim, message: str) -> None:
        """To be tried again, or dead after the last attempt."""
        self._of_claim(claim, _FAILED, self.max_attempts, message)

    def _of_claim(self, claim: Claim, values: str, *arguments: Any) -> None:
        if not self._update(values, "id = ? AND token = ?", *arguments, *claim):
            raise LostClaim(claim.id)

    def fail_claims(self, worker: str = "", message: str = _SILENT) -> int:
        """Fails the claims of a worker that has ended, or without a name of all; returns how many there were."""
        return self._update(_FAILED, "? IN ('', worker)", self.max_attempts, message, worker)

    def release_claims(self, worker: str) -> None:
        """Gives back what a worker had when it was stopped; it may not run any more."""
        self._update("state = 'pending', token = '', attempts = attempts - 1", "worker = ?", worker)

    def _update(self, values: str, where: str, *arguments: Any) -> int:
        """Changes claimed jobs; returns how many."""
        statement = f"UPDATE jobs SET {values} WHERE state = 'claimed' AND {where} RETURNING id"
        return len(self._run(statement, *arguments))

    def _run(self, statement: str, *values: Any) -> list[tuple]:
        with self.transaction() as execute:
            return execute(statement, *values)

    def move(self, ids: Iterable[str], state: str, to: str = "pending") -> None:
        """Jobs that are done or dead get another state, as if they had not been tried."""
        statement = "UPDATE jobs SET state = ?, attempts = 0 WHERE id = ? AND state = ?"
        with self.transaction() as execute:
            for each in ids:
                execute(statement, to, each, state)

    def counts(self) -> dict[str, int]:
        """{state: jobs}, for all states."""
        found = self._run("SELECT state, COUNT(*) FROM jobs GROUP BY state")
        return dict.fromkeys(STATES, 0) | dict(found)

    def jobs(self, state: str = "") -> dict[str, JobRow]:
        """{job: row} of all jobs, or of those in a state, sorted by id."""
        where, values = ("WHERE state = ?", [state]) if state else ("", [])
        statement = "SELECT id, state, token, progress, message, seconds, stages FROM jobs"
        rows = sorted(self._run(f"{statement} {where}", *values))
        return {job: JobRow._make([*row, json.loads(stages)]) for job, *row, stages in rows}

    def totals(self) -> tuple[int, int, float]:
        """Bytes of what needs no more work (the done and the dead), bytes of all, seconds of audio that were analyzed."""
        statement = (
            "SELECT COALESCE(SUM(size) FILTER (WHERE state IN ('done', 'dead')), 0),"
            " COALESCE(SUM(size), 0), COALESCE(SUM(seconds), 0) FROM jobs"
        )
        done, size, seconds = self._run(statement)[0]
        return int(done), int(size), float(seconds)

    def put_source(self, source: Source) -> None:
        """Remembers a path with its content; an earlier content of the path is forgotten."""
        statement = "INSERT INTO sources VALUES (?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET"
        statement += " name = excluded.name, size = excluded.size, version = excluded.version,"
        self._run(f"{statement} file = excluded.file", *source)

    def forget_sources(self, paths: Iterable[str]) -> None:
        with self.transaction() as execute:
            for path in paths:
                execute("DELETE FROM sources WHERE path = ?", path)

    def sources(self, file: str = "") -> dict[str, Source]:
        """{path: source} of all sources, or of those with a content, sorted by path."""
        where, values = ("WHERE file = ?", [file]) if file else ("", [])
        rows = self._run(f"SELECT path, name, size, version, file FROM sources {where}", *values)
        return {row[0]: Source(*row) for row in sorted(rows)}


class SqliteQueue(Queue):
    """In a file: processes of one machine, which share a local disk."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"
    lock_rows = ""  # one process writes at a time
    begin = "BEGIN IMMEDIATE"  # one that begins by reading could not wait for its turn to write
    mark = "?"
    error = sqlite3.Error

    def __init__(self, path: Path, max_attempts: int):
        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
            # Refused at once, without a wait, where another process makes the file; that one sets it.
            with suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA journal_mode = WAL")
            return connection

        advice = "it must be on a local disk with free space; if it is damaged or of another version, remove it"
        super().__init__(connect, str(path), advice, max_attempts)


def is_collection_id(name: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", name) is not None


class PostgresQueue(Queue):
    """In PostgreSQL: any number of machines. Each collected folder has a schema of its own."""

    now = "extract(epoch from clock_timestamp())::double precision"
    lock_rows = "FOR UPDATE SKIP LOCKED"
    begin = "BEGIN"
    mark = "%s"

    def __init__(self, url: str, collection: str, max_attempts: int):
        import psycopg

        # It stands in statements, where no value can take a name's place.
        require(
            is_collection_id(collection), f"{collection!r} is no collection; give its own OUTPUT"
        )
        self.error, schema = psycopg.Error, f"titan_tts_{collection}"
        super().__init__(
            lambda: psycopg.connect(url, autocommit=True, connect_timeout=_CONNECT_SECONDS),
            f"--queue {url}",
            "check that the database runs and that the user may create a schema",
            max_attempts,
            # Two machines that begin at once would both find the tables missing.
            f"SELECT pg_advisory_xact_lock(hashtext('{schema}'))",
            f'CREATE SCHEMA IF NOT EXISTS "{schema}"',
            f'SET search_path TO "{schema}"',
        )


def open_queue(url: str, output: Path, collection: str, max_attempts: int = 3) -> Queue:
    """The queue of a collected folder, made where it is missing.

    Args:
        url: postgresql://..., or empty for a file in `output`.
        collection: name of the folder's tables in a database that others use, too.
    """
    if not url:
        return SqliteQueue(output / QUEUE_NAME, max_attempts)
    require(
        url.startswith(("postgresql://", "postgres://")),
        f"--queue = {url!r} is no database; give postgresql://USER:PASSWORD@HOST/DATABASE, or nothing for a file in OUTPUT",
    )
    return PostgresQueue(url, collection, max_attempts)
