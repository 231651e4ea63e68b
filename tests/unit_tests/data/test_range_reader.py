"""Byte ranges of remote tars: right, many at once, and each failure is one sentence. A run reads the same over http as
from a disk, and an outage is no corruption."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest

from tests.helpers.loaders import CHANNELS, SKIP, build, samples_of, take
from tests.helpers.sentences import sentence_of
from tools.harness.http_server import FolderServer
from tools.harness.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.range_reader import Extent, RangeReader

TAR_BYTES = 400_000


pytestmark = pytest.mark.usefixtures("fast_and_direct")


@pytest.fixture
def tars(tmp_path) -> list[bytes]:
    (tmp_path / "tars").mkdir()
    contents = [np.random.default_rng(number).bytes(TAR_BYTES) for number in range(6)]
    for number, content in enumerate(contents):
        (tmp_path / "tars" / f"{number}.tar").write_bytes(content)
    return contents


@pytest.fixture
def range_server(tars, tmp_path):
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
    """The bytes of the tars at these extents."""
    return [tars[int(Path(e.path).stem)][e.start : e.stop] for e in extents]


def test_each_extent_is_requested_once_and_few_are_in_flight(range_server, tars):
    extents = extents_of(range_server, 0, 20) + extents_of(range_server, 1, 10)
    reader = RangeReader(8)
    # The same start with another end, an empty one and the same twice.
    first = extents[0]
    extents += [replace(first, stop=10), first, replace(first, start=7, stop=7)]
    range_server.requests.clear()
    assert reader.fetch(extents) == right(tars, extents)
    assert range_server.requests == {"GET": 31}
    extents = [e for number in range(4) for e in extents_of(range_server, number, 40)]
    with ThreadPoolExecutor(4) as pool:
        parts = [extents[number::4] for number in range(4)]
        assert list(pool.map(reader.fetch, parts)) == [right(tars, part) for part in parts]
    assert 1 < range_server.peak_in_flight <= 8


@pytest.mark.parametrize("status", [503, 429, 408])
def test_failures_that_pass_are_tried_again(range_server, tars, caplog, monkeypatch, status):
    waits, extents = [], extents_of(range_server, 0, 3)
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 1.0)
    monkeypatch.setattr(remote, "WAIT_FACTOR", 10.0)
    range_server.fail_first, range_server.fail_status = 2, status
    assert RangeReader().fetch(extents[:1]) == right(tars, extents[:1])
    assert len(caplog.records) == 2 and f"status {status}" in caplog.text
    assert "(2 of 5)" in caplog.messages[0] and "(3 of 5)" in caplog.messages[1]
    assert 0.75 <= waits[0] <= 1.0 and 7.5 <= waits[1] <= 10.0
    caplog.clear()
    # The first attempt of all of them: one warning.
    range_server.fail_first = range_server.hold_until = 3
    range_server.peak_in_flight = 0
    assert RangeReader().fetch(extents) == right(tars, extents) and len(caplog.records) == 1


def test_failures_that_stay_are_one_sentence(range_server):
    extents = extents_of(range_server, 0, 1)
    range_server.fail_first = 1000
    range_server.requests.clear()
    assert sentence_of(RangeReader().fetch, extents).startswith(
        f"{url_of(range_server, 0)}: cannot be read at bytes 0-999 (status 503, tried {remote.TRIES} times)"
    )
    assert range_server.requests == {"GET": remote.TRIES}
    range_server.fail_first, range_server.fail_status = 1, 400
    range_server.requests.clear()
    assert "(status 400)" in sentence_of(RangeReader().fetch, extents)
    assert range_server.requests == {"GET": 1}


def test_changed_tars_and_servers_without_ranges(range_server, tars, monkeypatch):
    extents, reader = extents_of(range_server, 0, 4), RangeReader()
    range_server.honour_ranges = False
    with monkeypatch.context() as patch:  # such a tar may be larger than the memory
        patch.setattr(aiohttp.ClientResponse, "read", None)  # all of it
        assert "the server ignores range requests" in sentence_of(reader.fetch, extents)
        range_server.whole_status = 206  # says that it is a part
        assert "the server ignores range requests" in sentence_of(reader.fetch, extents)
        info = {"size": TAR_BYTES, "partial": False}  # of one that says so
        store = SimpleNamespace(info=lambda path: info)
        patch.setattr(remote, "filesystem", lambda url: (store, url))
        assert "the server refuses range requests" in sentence_of(remote.stat, extents[0].path)
    range_server.honour_ranges = True
    reader.suspect(extents[1].path)
    assert reader.fetch(extents) == right(tars, extents)
    for content in (tars[1], tars[0] + b"more"):  # of the same length, and of another
        (range_server.folder / "0.tar").write_bytes(content)
        reader.suspect(extents[1].path)
        assert "0.tar: has another content than" in sentence_of(reader.fetch, extents)
    (range_server.folder / "0.tar").write_bytes(tars[0][:1000])
    assert "0.tar: has another content than" in sentence_of(reader.fetch, extents[1:])


@pytest.fixture
def served(tmp_path):
    make_shards(tmp_path / "served", 120, seed=7, channels=CHANNELS)
    with FolderServer(tmp_path / "served") as started:
        yield started


def over_http(served, **changes):
    urls = f"{served.url}/{{000000..000001}}.tar"
    return build(None, path=urls, **changes)


def test_the_samples_of_a_batch_are_requested_at_once(served):
    """A sidecar next to the tar spares reading all of it."""
    open_dataset(str(served.folder), CHANNELS)  # makes the sidecars
    loader = over_http(served)
    assert len(loader.dataset) == 120 and served.requests["GET"] <= 4
    served.hold_until = 8  # answers come only when all samples of a batch have been asked for
    take(loader, 1)
    assert served.peak_in_flight >= 8


def test_what_is_corrupt_on_its_way_is_read_once_more(served, monkeypatch):
    dataset = open_dataset(f"{served.url}/{{000000..000001}}.tar", CHANNELS)
    origin = open_dataset(str(served.folder), CHANNELS)
    fetch, broken = RangeReader.fetch, []

    def every_second_time(reader, extents):
        broken.append(not (broken and broken[-1]))
        return [bytes(len(one)) if broken[-1] else one for one in fetch(reader, extents)]

    monkeypatch.setattr(RangeReader, "fetch", every_second_time)
    latents = np.empty((3, CHANNELS), np.float32)
    for read in (
        lambda data: data.read(119)[0].tolist(),
        lambda data: data.load(1, fetched=data.fetch([1]).samples.get(1)).metadata,
        lambda data: data.metadata(2),
        lambda data: data.load_latents(4, latents, 1) or latents.tolist(),
    ):
        assert read(dataset) == read(origin)
    assert broken == 4 * [True, False]
    dataset.fetch([0], [3])  # corrupt
    samples, alone = dataset.fetch([0, 1], [3, 4])
    assert list(samples) == [0, 1] and broken[8:] == [True, False]
    for sample, data in alone.items():
        assert data == origin.read(sample)[0].astype(np.float16).tobytes()


def test_a_server_that_is_gone_is_no_corrupt_sample(served):
    loader = over_http(served, **SKIP)
    rows = sum(len(inputs["sample_id"]) for inputs, _ in take(loader, 2))
    shutil.rmtree(served.folder)
    with pytest.raises(ValueError, match="http://127.0.0.1"):
        take(loader, 2)
    assert loader.corrupt_samples.reads == rows and not loader.corrupt_samples._corrupt


@pytest.mark.filterwarnings("error::UserWarning")
def test_signed_urls_have_the_batches_of_the_disk_whatever_the_signature(served):
    local = build(served.folder)  # makes sidecars, which no signature opens

    def signed(signature):
        urls = [f"{served.url}/{n:06d}.tar?X-Signature={signature}" for n in range(2)]
        return build(None, path=urls, num_workers=2)

    first, renewed = signed("one"), signed("two")
    assert first.dataset.fingerprint == local.dataset.fingerprint
    assert samples_of(take(first, 7)) == samples_of(take(local, 7))
    renewed.load_state_dict(first.state_dict())
    assert samples_of(take(local, 30)) == samples_of(take(renewed, 30))
    assert "X-Signature" not in renewed.dataset.sample_id(0)
    assert "/000001.tar.idx?X-Signature=one" in served.targets


def test_a_sidecar_of_another_tar_is_not_taken(served, tmp_path):
    """One of equal size, as a rewritten tar's old index may be."""
    build(served.folder)
    other = make_shards(tmp_path / "other", 120, seed=7, channels=CHANNELS)
    flip_bits(other / "000000.tar", [3 * 59 + 2])
    shutil.copy(other / "000000.tar", served.folder)
    loader = over_http(served, on_error="skip", max_corrupt_fraction=1.0)
    assert len(loader.dataset.problems) == 1  # found while the tar was indexed again
