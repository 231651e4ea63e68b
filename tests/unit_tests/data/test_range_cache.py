"""Range reads are right, many at once, and cheap the second time, whatever happens to the cache."""

import contextlib
import errno
import itertools
import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from filelock import FileLock

from tests.helpers.sentences import sentence_of
from tools.harness.http_server import FolderServer
from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data import remote_cache as disk_cache
from torchtitan.models.dit_tts.data.range_cache import Extent, RangeReader
from torchtitan.models.dit_tts.data.remote_cache import RECORD

TAR_BYTES = 400_000


@pytest.fixture
def tars(tmp_path) -> list[bytes]:
    (tmp_path / "tars").mkdir()
    contents = [np.random.default_rng(number).bytes(TAR_BYTES) for number in range(6)]
    for number, content in enumerate(contents):
        (tmp_path / "tars" / f"{number}.tar").write_bytes(content)
    return contents


@pytest.fixture
def server(tars, tmp_path):
    with FolderServer(tmp_path / "tars") as server:
        yield server


def url_of(server, number: int) -> str:
    return f"{server.url}/{number}.tar"


def extents_of(server, number: int, count: int, size: int = 1000) -> list[Extent]:
    """`count` extents spread over a tar."""
    version = remote.stat(url_of(server, number)).version
    starts = np.linspace(0, TAR_BYTES - size, count).astype(int).tolist()
    return [
        Extent(url_of(server, number), TAR_BYTES, version, start, start + size) for start in starts
    ]


def right(tars, extents) -> list[bytes]:
    """What the tars hold there."""
    return [tars[int(Path(e.path).stem)][e.start : e.stop] for e in extents]


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def test_two_hundred_extents_at_64_in_flight(server, tars):
    extents = extents_of(server, 0, 100) + extents_of(server, 1, 100)
    random.Random(0).shuffle(extents)
    reader = RangeReader(None, 0, max_in_flight=64)
    # No answer leaves before so many requests are there at once: fewer in flight would hang.
    server.hold_until = 64
    assert reader.fetch(extents) == right(tars, extents)
    assert server.peak_in_flight == 64 and server.requests["GET"] == 200


@pytest.mark.long
def test_s3_reaches_64_in_flight_too(server, tars, monkeypatch):
    """Its client's own pool holds 10 connections by default."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url.rpartition("/")[0] + "/" + server.url[7:])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    fsspec.filesystem("s3").clear_instance_cache()
    (server.folder / "bucket").mkdir()
    os.link(server.folder / "0.tar", server.folder / "bucket" / "0.tar")
    extents = [
        Extent("s3://bucket/0.tar", TAR_BYTES, 1, start, start + 500)
        for start in range(0, 80_000, 1000)
    ]
    server.hold_until = 64
    assert RangeReader(None, 0).fetch(extents) == right(tars, extents)
    assert server.peak_in_flight == 64
    server.hold_until = 0
    server.deny.add("0.tar")
    assert "status 403: access denied" in sentence_of(RangeReader(None, 0).fetch, extents[:1])
    fsspec.filesystem("s3").clear_instance_cache()


def test_second_fetch_makes_no_request(server, tars, tmp_path):
    extents = extents_of(server, 0, 50) + extents_of(server, 1, 50)
    # The same start with another end, an empty one and the same twice.
    first = extents[0]
    extents += [Extent(first.path, first.size, first.version, 0, 10), first]
    extents += [Extent(first.path, first.size, first.version, 7, 7)]
    cache = str(tmp_path / "cache")
    server.requests.clear()
    reader = RangeReader(cache, 4 << 20)
    assert reader.fetch(extents) == right(tars, extents)
    assert server.requests == {"GET": 101}
    server.requests.clear()
    for again in (reader, RangeReader(cache, 4 << 20)):
        assert again.fetch(extents[::-1]) == right(tars, extents[::-1])
    assert not server.requests
    logs = sum(path.stat().st_size for path in Path(cache).glob("*.log"))
    assert logs == 101 * 24


def test_another_version_is_another_tar(server, tars, tmp_path):
    reader = RangeReader(str(tmp_path / "cache"), 1 << 20)
    (old,) = extents_of(server, 0, 1)
    reader.fetch([old])
    (server.folder / "0.tar").write_bytes(tars[1])
    (new,) = extents_of(server, 0, 1)
    assert new != old and reader.fetch([new]) == right([tars[1]], [new])


def test_the_same_path_on_another_server_is_another_tar(server, tars, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0.tar").write_bytes(tars[1])
    ours = extents_of(server, 0, 3)
    with FolderServer(tmp_path / "other") as other:
        both = [*ours, *(replace(each, path=url_of(other, 0)) for each in ours)]
        reader = RangeReader(str(tmp_path / "cache"), 1 << 20)
        for _ in range(2):
            assert reader.fetch(both) == right(tars, ours) + right([tars[1]], ours)
        assert other.requests["GET"] == server.requests["GET"] == 3


@pytest.mark.long
def test_bound_holds_while_threads_and_readers_share_the_folder(server, tars, tmp_path):
    extents = [e for number in range(4) for e in extents_of(server, number, 40)]
    cache, limit = tmp_path / "cache", 300_000
    # Each reader has a lock file of its own open, as two processes have.
    readers = [RangeReader(str(cache), limit, max_in_flight=8) for _ in range(2)]

    def fetch_some(seed: int) -> bool:
        some = random.Random(seed).choices(extents, k=30)
        is_right = readers[seed % 2].fetch(some) == right(tars, some)
        return is_right and disk_bytes(cache) <= limit + 30 * 3 * 4096

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fetch_some, range(40)))
    assert server.peak_in_flight <= 16 and disk_bytes(cache) > limit // 4


def test_least_recently_used_tars_go_first(server, tars, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "TOUCH_SECONDS", 0.0)
    cache = tmp_path / "cache"
    groups = [extents_of(server, number, 4, size=20_000) for number in range(6)]
    reader = RangeReader(str(cache), 480_000)  # four groups of 20 to 24 blocks and a log
    for number in (0, 1, 2, 3, 0, 4, 5):
        assert reader.fetch(groups[number]) == right(tars, groups[number])
        time.sleep(0.02)  # above the resolution of a file's time
        assert disk_bytes(cache) <= 480_000
    server.requests.clear()
    assert RangeReader(str(cache), 480_000).fetch(groups[0]) == right(tars, groups[0])
    assert RangeReader(str(cache), 480_000).fetch(groups[5]) == right(tars, groups[5])
    assert not server.requests
    reader.fetch(groups[1])
    assert server.requests == {"GET": 4}


def test_other_files_in_the_folder_stay(server, tars, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    others = {name: os.urandom(30_000) for name in ("thesis.data", "0.log", "a" * 32, "usage")}
    for name, data in others.items():
        (cache / name).write_bytes(data)
    reader = RangeReader(str(cache), 60_000)
    for number in range(6):
        extents = extents_of(server, number, 3, size=10_000)
        assert reader.fetch(extents) == right(tars, extents)
    assert {name: (cache / name).read_bytes() for name in others} == others


def test_corrupt_cache_is_read_again(server, tars, tmp_path, caplog):
    cache = tmp_path / "cache"
    extents = extents_of(server, 0, 20)
    reader = RangeReader(str(cache), 4 << 20)
    reader.fetch(extents)
    (data,), (log,) = cache.glob("*.data"), cache.glob("*.log")
    whole_log = log.read_bytes()

    def check(requests: int) -> None:
        server.requests.clear()
        for reading in (RangeReader(str(cache), 4 << 20), reader):
            assert reading.fetch(extents) == right(tars, extents)
            assert server.requests["GET"] == requests  # the first reader repairs the cache

    data.write_bytes(bytes(255 - byte for byte in data.read_bytes()))
    check(20)
    assert len(caplog.records) == 1 and "corrupt" in caplog.text
    # A kill cuts a record short.
    log.write_bytes(whole_log[:-10])
    check(1)
    assert log.read_bytes() == whole_log
    log.write_bytes(os.urandom(24 * 30 + 5))
    check(20)
    for path in (data, log):
        path.unlink()
        check(20)
    (cache / "titan-tts-cache.usage").write_bytes(b"junk" * 3)
    (other,) = extents_of(server, 1, 1)
    assert RangeReader(str(cache), 4 << 20).fetch([other]) == right(tars, [other])


def test_eviction_while_another_holds_the_file(server, tars, tmp_path):
    """Readers as of two processes: what one removes, the other does not find and puts back."""
    cache = tmp_path / "cache"
    ours, others = (RangeReader(str(cache), 100_000) for _ in range(2))
    groups = [extents_of(server, number, 4, size=9000) for number in range(2)]
    ours.fetch(groups[0])
    with next(cache.glob("*.data")).open("rb") as held:
        others.fetch(groups[1])
        assert os.fstat(held.fileno()).st_blocks == 0  # held open, but its disk is free
    server.requests.clear()
    for _ in range(2):
        assert ours.fetch(groups[0]) == right(tars, groups[0])
    assert server.requests == {"GET": 4}
    shutil.rmtree(cache)
    for _ in range(2):
        assert others.fetch(groups[1]) == right(tars, groups[1])
    assert server.requests == {"GET": 8}


def test_forgotten_extents_are_asked_for_again(server, tars, tmp_path):
    for cache in (None, str(tmp_path / "cache")):
        reader = RangeReader(cache, 1 << 20)
        extents = extents_of(server, 0, 3)
        reader.fetch(extents)
        reader.forget(extents[1])
        server.requests.clear()
        assert reader.fetch(extents) == right(tars, extents)
        assert server.requests == {"HEAD": 1, "GET": 3 if cache is None else 1}
        # One that changed without a change of its length shows itself now.
        (server.folder / "0.tar").write_bytes(tars[1])
        reader.forget(extents[1])
        assert "has another content than its index" in sentence_of(reader.fetch, extents)
        (server.folder / "0.tar").write_bytes(tars[0])


def test_forgotten_extents_are_forgotten_by_other_processes(server, tars, tmp_path):
    """Readers as of two processes, of which one has the extents in mind and one is started later."""
    extents, cache = extents_of(server, 0, 3), str(tmp_path / "cache")
    ours, others = (RangeReader(cache, 1 << 20) for _ in range(2))
    for reader in (ours, others):
        reader.fetch(extents)
    ours.forget(extents[1])
    server.requests.clear()
    assert others.fetch(extents) == right(tars, extents)
    assert server.requests["GET"] == 1
    ours.forget(extents[1])
    assert RangeReader(cache, 1 << 20).fetch(extents) == right(tars, extents)
    assert server.requests["GET"] == 2


def test_retries_then_one_sentence(server, tars, caplog):
    extents = extents_of(server, 0, 3)
    server.fail_first = 4
    assert RangeReader(None, 0).fetch(extents) == right(tars, extents)
    assert "status 503" in caplog.text and {r.levelname for r in caplog.records} == {"WARNING"}
    server.fail_first = 1000
    server.requests.clear()
    assert sentence_of(RangeReader(None, 0).fetch, extents[:1]).startswith(
        f"{url_of(server, 0)}: cannot be read at bytes 0-999 (status 503, tried {remote.TRIES} times)"
    )
    assert server.requests == {"GET": remote.TRIES}
    server.fail_first, server.fail_status = 1, 400
    server.requests.clear()
    assert "(status 400)" in sentence_of(RangeReader(None, 0).fetch, extents[:1])
    assert server.requests == {"GET": 1}


def test_changed_tars_and_servers_without_ranges(server, tars):
    extents = extents_of(server, 0, 4)
    server.honour_ranges = False
    assert "the server ignores range requests" in sentence_of(RangeReader(None, 0).fetch, extents)
    server.honour_ranges = True
    (server.folder / "0.tar").write_bytes(tars[0] + b"more")
    assert "0.tar: has 400004 bytes where its index was made from 400000; shards" in sentence_of(
        RangeReader(None, 0).fetch, extents
    )
    (server.folder / "0.tar").write_bytes(tars[0][:1000])
    assert "0.tar: has another content than" in sentence_of(RangeReader(None, 0).fetch, extents[1:])


def test_a_folder_that_cannot_be_made_is_one_warning(server, tars, tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    extents = extents_of(server, 0, 4)
    reader = RangeReader(str(tmp_path / "file" / "cache"), 1 << 20)
    for _ in range(3):
        assert reader.fetch(extents) == right(tars, extents)
    assert len(caplog.records) == 1 and "cannot be used as a cache" in caplog.text


def test_a_full_disk_is_one_warning(server, tars, tmp_path, caplog, monkeypatch):
    extents = extents_of(server, 0, 4)
    reader = RangeReader(str(tmp_path), 1 << 20)
    reader.fetch(extents[:1])

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_cache.os, "pwrite", full)
    for _ in range(3):
        assert reader.fetch(extents) == right(tars, extents)
    assert len(caplog.records) == 1 and "cannot be used as a cache" in caplog.text
    # What was cached before is still read from there, until it is forgotten.
    for requests in (0, 1):
        server.requests.clear()
        assert reader.fetch(extents[:1]) == right(tars, extents[:1])
        assert server.requests["GET"] == requests
        reader.forget(extents[0])


def test_records_of_many_samples():
    count = 10_000
    stored = np.zeros(count, RECORD)
    stored["start"] = np.random.default_rng(0).permutation(count) * 512
    stored["stop"] = stored["start"] + 100
    stored["hash"] = np.arange(count) + 1
    newest = stored[:1000].copy()
    newest["hash"] += 7
    records = disk_cache._Records()
    # The second and the last are too few to be merged at once.
    half = count // 2
    for part in (stored[:half], stored[half : half + 50], stored[half + 50 :], newest[:9], newest):
        records.add(part)
    for row in (0, 8, 999, 1000, half, half + 49, half + 50, count - 1):
        start, stop, content_hash = stored[row].tolist()
        assert records.get(start, stop) == content_hash + (7 if row < 1000 else 0)
        assert records.get(start, stop + 1) == records.get(start + 1, stop) == 0
    records.drop(start, stop)
    assert records.get(start, stop) == 0


class Killed(BaseException):
    pass


@pytest.mark.long
def test_killed_before_every_change_to_the_disk(server, tars, tmp_path):
    """A kill before the k-th change, for each k of a fetch that evicts."""
    limit = 220_000
    groups = [extents_of(server, number, 4, size=20_000) for number in range(3)]

    def killed_at(change: int) -> bool:
        """Whether the fetch makes so many changes."""
        cache = tmp_path / f"cache{change}"
        reader = RangeReader(str(cache), limit)
        reader.fetch(groups[0])
        time.sleep(0.02)  # above the resolution of a file's time
        reader.fetch(groups[1])
        changes = itertools.count(1)

        def killing(function):
            def call(*arguments):
                if next(changes) >= change:
                    raise Killed
                return function(*arguments)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("pwrite", "truncate", "ftruncate", "unlink"):
                patch.setattr(disk_cache.os, name, killing(getattr(os, name)))
            try:
                reader.fetch(groups[2])
                return False
            except Killed:
                pass
        # What other processes go by is never too little, but for the file itself.
        count = int.from_bytes((cache / "titan-tts-cache.usage").read_bytes(), "little")
        assert count + 4096 >= disk_bytes(cache)
        again = RangeReader(str(cache), limit)
        for number in (2, 1, 0, 2):
            assert again.fetch(groups[number]) == right(tars, groups[number])
            assert disk_bytes(cache) <= limit + 4 * 7 * 4096
        return True

    killed = list(itertools.takewhile(killed_at, itertools.count(1)))
    # Bytes 4 times, records once, creating once (2 files), the count twice; removing 4 times.
    assert len(killed) >= 13


def test_a_stopped_process_does_not_hold_up_the_others(server, tars, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_LOCK_SECONDS", 0.05)
    reader = RangeReader(str(tmp_path / "cache"), 1 << 20)
    extents = extents_of(server, 0, 2)
    reader.fetch(extents[:1])
    with FileLock(tmp_path / "cache" / "titan-tts-cache.lock"):
        assert reader.fetch(extents) == right(tars, extents)
    for _ in range(2):
        server.requests.clear()
        reader.fetch(extents)
    assert not server.requests
