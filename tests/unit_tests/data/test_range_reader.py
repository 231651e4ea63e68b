"""Range reads are right, many at once, and each failure is one sentence."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.sentences import sentence_of
from tools.harness.http_server import FolderServer
from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.range_reader import RangeReader
from torchtitan.models.dit_tts.data.remote import Extent

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


def test_each_extent_is_requested_once(server, tars):
    extents = extents_of(server, 0, 20) + extents_of(server, 1, 10)
    # The same start with another end, an empty one and the same twice.
    first = extents[0]
    extents += [replace(first, stop=10), first, replace(first, start=7, stop=7)]
    server.requests.clear()
    assert RangeReader().fetch(extents) == right(tars, extents)
    assert server.requests == {"GET": 31}


def test_requests_in_flight_are_bounded_over_all_threads(server, tars):
    extents = [e for number in range(4) for e in extents_of(server, number, 40)]
    reader = RangeReader(max_in_flight=8)
    with ThreadPoolExecutor(4) as pool:
        parts = [extents[number::4] for number in range(4)]
        assert list(pool.map(reader.fetch, parts)) == [right(tars, part) for part in parts]
    assert 1 < server.peak_in_flight <= 8


def test_a_tar_that_is_suspected_and_has_changed_is_said(server, tars):
    """Also where its length is the same."""
    extents, reader = extents_of(server, 0, 3), RangeReader()
    reader.suspect(extents[1])
    assert reader.fetch(extents) == right(tars, extents)
    (server.folder / "0.tar").write_bytes(tars[1])
    reader.suspect(extents[1])
    assert "has another content than its index" in sentence_of(reader.fetch, extents)


def test_retries_then_one_sentence(server, tars, caplog):
    extents = extents_of(server, 0, 3)
    server.fail_first = 4
    assert RangeReader().fetch(extents) == right(tars, extents)
    assert "status 503" in caplog.text and {r.levelname for r in caplog.records} == {"WARNING"}
    server.fail_first = 1000
    server.requests.clear()
    assert sentence_of(RangeReader().fetch, extents[:1]).startswith(
        f"{url_of(server, 0)}: cannot be read at bytes 0-999 (status 503, tried {remote.TRIES} times)"
    )
    assert server.requests == {"GET": remote.TRIES}
    server.fail_first, server.fail_status = 1, 400
    server.requests.clear()
    assert "(status 400)" in sentence_of(RangeReader().fetch, extents[:1])
    assert server.requests == {"GET": 1}


def test_changed_tars_and_servers_without_ranges(server, tars):
    extents = extents_of(server, 0, 4)
    server.honour_ranges = False
    assert "the server ignores range requests" in sentence_of(RangeReader().fetch, extents)
    server.honour_ranges = True
    (server.folder / "0.tar").write_bytes(tars[0] + b"more")
    assert "0.tar: has 400004 bytes, but its index was made from 400000; shards" in sentence_of(
        RangeReader().fetch, extents
    )
    (server.folder / "0.tar").write_bytes(tars[0][:1000])
    assert "0.tar: has another content than" in sentence_of(RangeReader().fetch, extents[1:])
