"""Sources and jobs of a collection, also those that an earlier version kept in SQLite."""

import sqlite3
from contextlib import closing

from tests.helpers.sentences import refused
from titan_tts.collect.queue import Queue, Source

ONE, TWO, COPY = (
    Source("/s/one.wav", "one.wav", 10, 5, "1" * 16),
    Source("/s/two.wav", "two.wav", 20, 6, "2" * 16),
    Source("/s/copy.wav", "copy.wav", 10, 7, "1" * 16),
)


def test_jobs_are_the_contents_of_sources(tmp_path):
    queue = Queue(tmp_path, 2)
    for source in (TWO, ONE, COPY):
        queue.put_source(source)
    assert [*queue.jobs()] == [ONE.file, TWO.file]
    queue.fail(ONE.file, 1, "dark")
    queue.fail(TWO.file, 2, "torn")
    (tmp_path / "files" / ONE.file).mkdir(parents=True)
    queue.done(ONE.file, 1.5, {"text": 0.5})
    for again in (queue, Queue(tmp_path, 2)):
        assert again.sources() == {source.path: source for source in (COPY, ONE, TWO)}
        one, two = again.jobs().values()
        assert (one.state, one.seconds, one.stages, one.attempts) == ("done", 1.5, {"text": 0.5}, 0)
        assert (two.state, two.message, two.attempts) == ("dead", "torn", 2)
    assert Queue(tmp_path, 3).jobs()[TWO.file].state == "pending"
    queue.forget_failures()
    queue.forget_sources([ONE.path])
    again = Queue(tmp_path, 2).jobs()
    assert again[TWO.file].state == "pending" and again[ONE.file].seconds == 1.5
    queue.put_source(COPY._replace(version=8, file=TWO.file))
    assert [*Queue(tmp_path).jobs()] == [TWO.file]


def test_the_queue_of_an_earlier_version_is_taken_over(tmp_path):
    with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as old:
        old.execute("CREATE TABLE jobs (id, size, state, attempts, message)")
        old.execute("CREATE TABLE sources (path, name, size, version, file)")
        rows = [(ONE.file, 10, "done", 1, ""), (TWO.file, 20, "dead", 3, "torn")]
        old.executemany("INSERT INTO jobs VALUES (?, ?, ?, ?, ?)", rows)
        old.executemany("INSERT INTO sources VALUES (?, ?, ?, ?, ?)", [ONE, TWO, COPY])
        old.commit()
    (tmp_path / "files" / ONE.file).mkdir(parents=True)
    for queue in (Queue(tmp_path), Queue(tmp_path)):
        assert queue.sources() == {source.path: source for source in (COPY, ONE, TWO)}
        assert [row.state for row in queue.jobs().values()] == ["done", "dead"]
        assert queue.jobs()[TWO.file].message == "torn"


def test_a_queue_that_is_none_is_one_sentence(tmp_path):
    (tmp_path / "queue.sqlite").write_bytes(b"no database" * 100)
    refused(lambda: Queue(tmp_path), "queue.sqlite cannot be read", "remove it")
