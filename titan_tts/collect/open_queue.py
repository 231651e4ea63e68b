"""Opens the queue of a collected folder."""

from pathlib import Path

from titan_tts.collect.postgres_queue import PostgresQueue
from titan_tts.collect.queue import MAX_ATTEMPTS, Queue
from titan_tts.collect.sqlite_queue import SqliteQueue

QUEUE_NAME = "queue.sqlite"


def open_queue(url: str, output: Path, collection: str, max_attempts: int = MAX_ATTEMPTS) -> Queue:
    """The queue of a collected folder, made where it is missing.

    Args:
        url: postgresql://..., or empty for a file in `output`.
        collection: name of the folder's tables in a database that others use, too.
    """
    if url:
        return PostgresQueue(url, collection, max_attempts)
    return SqliteQueue(output / QUEUE_NAME, max_attempts)
