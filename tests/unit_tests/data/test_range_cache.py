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

import numpy as np
import pytest
from filelock import FileLock

from tests.helpers.sentences import sentence_of
from tools.harness.http_server import FolderServer
from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data import remote_cache as disk_cache
from torchtitan.models.dit_tts.data.remote_cache import RECORD_BYTES, Extent, RangeReader

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


def test_second_fetch_makes_no_request(server, tars, tmp_path):
    extents = extents_of(server, 0, 20) + extents_of(server, 1, 10)
    # The same start with another end, an empty one and the same twice.
    first = extents[0]
    extents += [replace(first, stop=10), first, replace(first, start=7, stop=7)]
    cache = str(tmp_path / "cache")
    server.requests.clear()
    reader = RangeReader(cache, 4 << 20)
    assert reader.fetch(extents) == right(tars, extents)
    assert server.requests == {"GET": 31}
    server.requests.clear()
    for again in (reader, RangeReader(cache, 4 << 20)):
        assert again.fetch(extents[::-1]) == right(tars, extents[::-1])
    assert not server.requests
    records = sum(path.stat().st_size for path in Path(cache).glob("*.extents"))
    assert records == 31 * RECORD_BYTES


def test_a_tar_is_known_by_its_url_and_version(server, tars, tmp_path):
    """Not by its path alone, on another server or after a change."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0.tar").write_bytes(tars[1])
    ours = extents_of(server, 0, 3)
    reader = RangeReader(str(tmp_path / "cache"), 1 << 20)
    with FolderServer(tmp_path / "other") as other:
        both = [*ours, *(replace(each, path=url_of(other, 0)) for each in ours)]
        for _ in range(2):
            assert reader.fetch(both) == right(tars, ours) + right([tars[1]], ours)
        assert other.requests["GET"] == server.requests["GET"] == 3
    (server.folder / "0.tar").write_bytes(tars[2])
    new = extents_of(server, 0, 3)
    assert reader.fetch(new) == right([tars[2]], new)


def test_what_is_left_of_a_cache(server, tars, tmp_path):
    """A kill cuts a record short; a file is gone; records are noise."""
    cache = tmp_path / "cache"
    extents = extents_of(server, 0, 20)
    reader = RangeReader(str(cache), 4 << 20)
    reader.fetch(extents)
    (data,), (records,) = cache.glob("*.data"), cache.glob("*.extents")
    whole = records.read_bytes()

    def check(requests: int) -> None:
        server.requests.clear()
        for reading in (RangeReader(str(cache), 4 << 20), reader):
            assert reading.fetch(extents) == right(tars, extents)
            assert server.requests["GET"] == requests  # the first reader repairs the cache

    records.write_bytes(whole[:-10])
    check(1)
    assert records.read_bytes() == whole
    records.write_bytes(os.urandom(RECORD_BYTES * 30 + 5))
    check(20)
    for path in (data, records):
        path.unlink()
        check(20)


def test_a_disk_that_takes_nothing_is_one_warning(server, tars, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    extents = extents_of(server, 0, 4)
    no_folder, full = (RangeReader(str(tmp_path / name), 1 << 20) for name in ("file/x", "cache"))
    full.fetch(extents[:1])

    def pwrite(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_cache.os, "pwrite", pwrite)
    for warnings, reader in enumerate((no_folder, full), start=1):
        for _ in range(3):
            assert reader.fetch(extents) == right(tars, extents)
        assert caplog.text.count("cannot be used as a cache") == len(caplog.records) == warnings
    # What was cached before is still read from there, until it is forgotten.
    for requests in (0, 1):
        server.requests.clear()
        assert full.fetch(extents[:1]) == right(tars, extents[:1])
        assert server.requests["GET"] == requests
        full.forget(extents[0])


class Killed(BaseException):
    pass


@pytest.mark.long
def test_killed_before_any_change_to_the_disk(server, tars, tmp_path):
    """A kill before the k-th change, for each k of a fetch that evicts; files of others stay."""
    groups = [extents_of(server, number, 4, size=20_000) for number in range(3)]
    others = {name: os.urandom(30_000) for name in ("thesis.data", "0.extents", "a" * 32)}

    def killed_at(change: int) -> bool:
        """Whether the fetch makes so many changes."""
        cache, changes = tmp_path / f"cache{change}", itertools.count(1)
        cache.mkdir()
        for name, data in others.items():
            (cache / name).write_bytes(data)
        reader = RangeReader(str(cache), 220_000)
        reader.fetch(groups[0])
        reader.fetch(groups[1])

        def killing(function):
            def call(*arguments):
                if next(changes) >= change:
                    raise Killed
                return function(*arguments)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("pwrite", "truncate", "ftruncate", "unlink"):
                patch.setattr(disk_cache.os, name, killing(getattr(os, name)))
            with contextlib.suppress(Killed):
                reader.fetch(groups[2])
                return False
        for number in (2, 1, 0, 2):
            again = RangeReader(str(cache), 220_000).fetch(groups[number])
            assert again == right(tars, groups[number])
        assert {name: (cache / name).read_bytes() for name in others} == others
        return True

    # Bytes 4 times, extents once, creating once or twice, removing a tar 4 times.
    assert len(list(itertools.takewhile(killed_at, itertools.count(1)))) >= 10


def test_a_stopped_process_does_not_hold_up_the_others(server, tars, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_LOCK_SECONDS", 0.05)
    reader, extents = RangeReader(str(tmp_path / "cache"), 1 << 20), extents_of(server, 0, 2)
    reader.fetch(extents[:1])
    with FileLock(tmp_path / "cache" / "titan-tts-cache.lock"):
        assert reader.fetch(extents[:2]) == right(tars, extents[:2])
    # It misses that write alone, and is a cache again.
    reader.fetch(extents)
    server.requests.clear()
    assert reader.fetch(extents) == right(tars, extents) and not server.requests


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
    reader = RangeReader(str(cache), 530_000)  # four groups of 20 to 24 blocks and their extents
    for number in (0, 1, 2, 3, 0, 4, 5):
        assert reader.fetch(groups[number]) == right(tars, groups[number])
        time.sleep(0.02)  # above the resolution of a file's time
        assert disk_bytes(cache) <= 530_000
    server.requests.clear()
    assert RangeReader(str(cache), 530_000).fetch(groups[0]) == right(tars, groups[0])
    assert RangeReader(str(cache), 530_000).fetch(groups[5]) == right(tars, groups[5])
    assert not server.requests
    reader.fetch(groups[1])
    assert server.requests == {"GET": 4}


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


def test_forgotten_extents_are_asked_for_again(server, tars, tmp_path, caplog):
    """Once, by all readers: as of a process that has the extents in mind, and of one started later."""
    extents, cache = extents_of(server, 0, 3), str(tmp_path / "cache")
    ours, others = (RangeReader(cache, 1 << 20) for _ in range(2))
    for reader in (ours, others):
        reader.fetch(extents)
    for reader in (ours, others, RangeReader(cache, 1 << 20)):
        ours.forget(extents[1])
        server.requests.clear()
        assert reader.fetch(extents) == right(tars, extents)
        assert server.requests["GET"] == 1
        assert ours.fetch(extents) == right(tars, extents) and server.requests["GET"] == 1
    assert caplog.text.count("are corrupt and are read from there again") == 1
    for reader in (ours, RangeReader(None, 0)):
        # One that changed without a change of its length shows itself now.
        (server.folder / "0.tar").write_bytes(tars[1])
        reader.forget(extents[1])
        assert "has another content than its index" in sentence_of(reader.fetch, extents)
        (server.folder / "0.tar").write_bytes(tars[0])


def test_records_of_many_samples():
    count, half = 10_000, 5000
    stored = np.zeros((count, 2), np.int64)
    stored[:, 0] = np.random.default_rng(0).permutation(count) * 512
    stored[:, 1] = stored[:, 0] + 100
    forgotten = stored[:1000] * [1, -1]
    records = disk_cache._Records()
    # The second and the fourth are too few to be merged at once.
    parts = (stored[:half], stored[half : half + 50], stored[half + 50 :], forgotten[:9], forgotten)
    for part in (*parts, stored[:1]):
        records.add(part)
    for row in (0, 8, 999, 1000, half, half + 49, half + 50, count - 1):
        start, stop = stored[row].tolist()
        assert records.has(start, stop) == (row == 0 or row >= 1000)
        assert not records.has(start, stop + 1) and not records.has(start + 1, stop)


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
    assert "0.tar: has 400004 bytes, but its index was made from 400000; shards" in sentence_of(
        RangeReader(None, 0).fetch, extents
    )
    (server.folder / "0.tar").write_bytes(tars[0][:1000])
    assert "0.tar: has another content than" in sentence_of(RangeReader(None, 0).fetch, extents[1:])
