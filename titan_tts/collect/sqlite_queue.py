"""The queue in a file: processes of one machine, which share a local disk."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_tts.collect.queue import MAX_ATTEMPTS, Execute, Queue
from torchtitan.models.dit_tts.errors import InputError, first_line

_WAIT_SECONDS = 60.0  # for another process's transaction


class SqliteQueue(Queue):
    now = "((julianday('now') - 2440587.5) * 86400.0)"
    lock_rows = ""  # BEGIN IMMEDIATE lets one process write at a time

    def __init__(self, path: Path, max_attempts: int = MAX_ATTEMPTS):
        super().__init__(max_attempts)
        self.path = path
        with self._in_a_sentence():
            self._connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = WAL")
        self.create()

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[Execute]:
        def execute(statement: str, *values: Any) -> list[tuple]:
            return self._connection.execute(statement, values).fetchall()

        with self._in_a_sentence():
            # At once: a transaction that begins by reading could not wait for its turn to write.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield execute
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextmanager
    def _in_a_sentence(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise InputError(
                f"{self.path}: the queue cannot be used ({first_line(error)}); it must be on a local disk with "
                "free space; start again, finished work is kept"
            ) from error
