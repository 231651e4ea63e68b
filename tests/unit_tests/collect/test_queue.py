"""The queue, the same on both engines: no job is lost, none is done by two."""

import sqlite3
import threading
import uuid
from collections import Counter
from contextlib import closing

import pytest

from tests.helpers.sentences import refused
from titan_tts.collect.queue import QUEUE_NAME, Claim, LostClaim, Queue, Source, open_queue

LONG = 3600.0
EXPIRED = 0.0  # a lease that has ended when the next statement runs


@pytest.fixture(params=["sqlite", "postgres"])
def connect(request, tmp_path):
    """Opens a connection to this test's own queue."""
    url = "" if request.param == "sqlite" else request.getfixturevalue("postgres")
    collection, opened = uuid.uuid4().hex, []

    def connect(max_attempts: int = 3) -> Queue:
        queue = open_queue(url, tmp_path, collection, max_attempts)
        if threading.current_thread() is threading.main_thread():  # others close their own
            opened.append(queue)
        return queue

    yield connect
    for each in opened:
        each.close()


@pytest.fixture
def queue(connect) -> Queue:
    return connect()


def numbers(**counts: int) -> dict[str, int]:
    return {"pending": 0, "claimed": 0, "done": 0, "dead": 0} | counts


def take(queue: Queue, lease: float = LONG, worker: str = "w") -> Claim:
    claim = queue.claim(worker, lease)
    assert claim is not None
    return claim


def test_a_job_is_added_claimed_and_done_once(queue, connect):
    assert queue.add([("a", 10), ("b", 30), ("c", 20)]) == 3
    other = connect()  # also to a queue that is there
    first, second = take(queue), take(other)
    assert (first.id, second.id) == ("b", "c")  # the largest first
    assert queue.counts() == numbers(pending=1, claimed=2)
    queue.heartbeat(first, LONG, "half")
    claimed = {(job, row.token, row.progress) for job, row in queue.jobs("claimed").items()}
    assert claimed == {("b", first.token, "half"), ("c", second.token, "")}
    queue.done(first, 1.5, {"text": 0.5})
    other.done(second, 0.0, {})
    assert queue.add([("b", 30), ("d", 1)]) == 1
    assert [take(queue).id for _ in range(2)] == ["a", "d"]
    assert queue.claim("w", LONG) is None
    assert queue.jobs()["b"] == ("done", "", "half", "", 1.5, {"text": 0.5})
    assert queue.totals() == (50, 61, 1.5)
    assert queue.jobs("done").keys() == {"b", "c"} and list(queue.jobs()) == [*"abcd"]


def test_a_silent_workers_job_goes_to_another_and_it_cannot_acknowledge(queue):
    queue.add([("a", 1)])
    silent = take(queue, EXPIRED)
    claim = take(queue)
    assert claim.id == "a" and claim.token != silent.token
    for late in (
        lambda: queue.heartbeat(silent, LONG),
        lambda: queue.done(silent, 1.0, {}),
        lambda: queue.fail(silent, "x"),
    ):
        with pytest.raises(LostClaim):
            late()
    queue.done(claim, 1.0, {})
    with pytest.raises(LostClaim):
        queue.done(claim, 1.0, {})


def test_a_lease_that_is_renewed_or_not_taken_yet_is_kept(queue):
    queue.add([("a", 1)])
    claim = take(queue, EXPIRED)
    queue.heartbeat(claim, LONG)
    assert queue.claim("other", LONG) is None
    queue.heartbeat(claim, EXPIRED)
    queue.done(claim, 1.0, {})
    assert queue.counts() == numbers(done=1)


@pytest.mark.parametrize("end", ["failed", "silent", "its process ended", "its command was killed"])
def test_a_job_is_dead_after_the_last_attempt(connect, end):
    queue = connect(max_attempts=2)
    queue.add([("bad", 9), ("good", 1)])
    for attempt in range(2):
        if attempt:  # one that has failed comes after those never tried
            queue.done(take(queue), 1.0, {})
        claim = take(queue, EXPIRED if end == "silent" else LONG, f"w{attempt}")
        assert claim.id == "bad"
        if end == "failed":
            queue.fail(claim, "is no audio")
        elif end == "its process ended":
            assert queue.fail_claims("another", "x") == 0
            assert queue.fail_claims(f"w{attempt}", "signal 9") == 1
            assert queue.fail_claims(f"w{attempt}", "signal 9") == 0
        elif end == "its command was killed":
            assert queue.fail_claims() == 1
    assert queue.claim("w", LONG) is None
    reason = {"failed": "is no audio", "its process ended": "signal 9"}
    [(job, row)] = queue.jobs("dead").items()
    assert job == "bad"
    assert reason.get(end, "silent during every attempt") in row.message
    assert queue.add([("bad", 9)]) == 0 and queue.totals()[:2] == (10, 10)
    queue.move(["bad", "good"], "dead")  # the good one is done, and stays so
    assert queue.counts() == numbers(pending=1, done=1)
    assert take(queue).id == "bad"


def test_a_stopped_workers_claims_are_given_back_and_no_others(queue):
    queue.add([("a", 1), ("b", 2)])
    take(queue, worker="stopped"), take(queue, worker="working")
    queue.release_claims("stopped")
    assert {job: row.state for job, row in queue.jobs().items()} == {"a": "claimed", "b": "pending"}


def test_jobs_that_are_given_back_have_lost_no_attempt(connect):
    queue = connect(max_attempts=1)
    queue.add([("a", 1)])
    for _ in range(3):
        take(queue)
        queue.release_claims("w")
    claim = take(queue)
    queue.fail(claim, "x")
    assert queue.counts() == numbers(dead=1)


def test_nothing_of_a_broken_transaction_remains(queue):
    with pytest.raises(ZeroDivisionError):
        queue.add((("a", 1) if n else 1 // 0) for n in (1, 0))
    assert queue.counts() == numbers()


def test_sources_are_remembered_by_path(queue):
    first, second = Source("/x/ü.mp3", "ü.mp3", 5, 1 << 62, "aa"), Source("/x/b", "b", 6, 2, "aa")
    queue.put_source(second)
    queue.put_source(first)
    edited = second._replace(size=7, file="bb")
    queue.put_source(edited)
    assert queue.sources() == {"/x/b": edited, "/x/ü.mp3": first}
    assert queue.sources("bb") == {"/x/b": edited} and queue.sources("cc") == {}
    queue.forget_sources(["/x/b", "/x/none"])
    assert queue.sources() == {"/x/ü.mp3": first}


def test_workers_at_the_same_time_share_the_jobs(connect):
    ids = [f"{number:02d}" for number in range(60)]
    taken: list[Claim] = []
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            with closing(connect()) as own:
                own.add((each, 1) for each in ids)
                while (claim := own.claim(name, LONG)) is not None:
                    taken.append(claim)
                    own.done(claim, 1.0, {})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert errors == []
    assert Counter(claim.id for claim in taken) == Counter(ids)
    assert len({claim.token for claim in taken}) == len(ids)


def test_a_file_that_another_process_makes_is_waited_for(tmp_path):
    """Whoever changes SQLite's journal at that time gets an error at once."""
    other = sqlite3.connect(tmp_path / QUEUE_NAME, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.1, other.execute, ("COMMIT",)).start()
    with closing(other), closing(open_queue("", tmp_path, "x")) as queue:
        queue.add([("a", 1)])
        assert queue.counts() == numbers(pending=1)


def test_two_folders_in_one_database(postgres, tmp_path):
    one, two = (open_queue(postgres, tmp_path, uuid.uuid4().hex) for _ in range(2))
    with closing(one), closing(two):
        one.add([("a", 1)])
        assert two.counts() == numbers() and one.counts() == numbers(pending=1)


def test_a_queue_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "queue.sqlite").write_bytes(b"no database, but a text of some length" * 9)
    refused(lambda: open_queue("", tmp_path, "c"), "queue.sqlite", "not a database", "remove it")
    refused(lambda: open_queue("mysql://x", tmp_path, "c"), "--queue", "postgresql://")
    gone = "postgresql://u@/d?host=/nowhere"
    refused(
        lambda: open_queue(gone, tmp_path, "c" * 32), "--queue", "cannot be used", "start again"
    )


def test_a_collection_of_another_name_is_no_schema():
    for name in ('a"; DROP TABLE jobs; --', "0" * 31, "A" * 32):
        refused(
            lambda: open_queue("postgresql://nobody@localhost:1/x", None, name), "no collection"
        )
