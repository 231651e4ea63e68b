"""The queue in PostgreSQL: any number of machines. Each collected folder has a schema of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from titan_tts.collect.queue import MAX_ATTEMPTS, Execute, Queue
from torchtitan.models.dit_tts.errors import InputError, first_line

SCHEMES = ("postgresql://", "postgres://")
_CONNECT_SECONDS = 15


class PostgresQueue(Queue):
    now = "extract(epoch from clock_timestamp())::double precision"
    lock_rows = "FOR UPDATE SKIP LOCKED"

    def __init__(self, url: str, collection: str, max_attempts: int = MAX_ATTEMPTS):
        super().__init__(max_attempts)
        import psycopg

        if not url.startswith(SCHEMES):
            raise InputError(
                f"--queue = {url!r} is no database; give postgresql://USER:PASSWORD@HOST/DATABASE, or nothing for a "
                "file in OUTPUT"
            )
        self.url, self.schema, self._error = url, f"titan_tts_{collection}", psycopg.Error
        with self._in_a_sentence():
            self._connection = psycopg.connect(
                url, autocommit=True, connect_timeout=_CONNECT_SECONDS
            )
        self.create(
            # Two machines that begin at once would both find the tables missing.
            f"SELECT pg_advisory_xact_lock(hashtext('{self.schema}'))",
            f"CREATE SCHEMA IF NOT EXISTS {self.schema}",
            f"SET search_path TO {self.schema}",
        )

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[Execute]:
        def execute(statement: str, *values: Any) -> list[tuple]:
            cursor = self._connection.execute(statement.replace("?", "%s"), values)
            return cursor.fetchall() if cursor.description else []

        with self._in_a_sentence(), self._connection.transaction():
            yield execute

    @contextmanager
    def _in_a_sentence(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise InputError(
                f"--queue {self.url}: the database cannot be used ({first_line(error)}); check that it runs and that "
                "the user may create a schema; start again, finished work is kept"
            ) from error
