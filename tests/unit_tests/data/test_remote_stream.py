"""The stream over http: the same batches as from disk, few requests, and an outage is no corruption."""

import shutil

import numpy as np
import pytest

from tests.helpers.loaders import CHANNELS, SKIP, assert_same, build, joined, take
from tools.harness.http_server import FolderServer
from tools.harness.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.range_reader import RangeReader


@pytest.fixture
def server(tmp_path):
    make_shards(tmp_path / "served", 120, seed=7, channels=CHANNELS)
    with FolderServer(tmp_path / "served") as started:
        yield started


def remote(server, **changes):
    urls = f"{server.url}/{{000000..000001}}.tar"
    return build(None, path=urls, **changes)


@pytest.mark.filterwarnings("error::UserWarning")
def test_same_batches_as_from_disk(server):
    local = build(server.folder)
    loader = remote(server, num_workers=2)
    assert loader.dataset.fingerprint == local.dataset.fingerprint
    for left, right in zip(take(loader, 40), take(local, 40), strict=True):
        assert_same(joined([left]), joined([right]))


def test_the_samples_of_a_batch_are_requested_at_once(server):
    """And a sidecar beside the tar spares reading the tar."""
    open_dataset(str(server.folder), CHANNELS)  # makes the sidecars
    loader = remote(server)
    assert len(loader.dataset) == 120 and server.requests["GET"] <= 4
    server.hold_until = 8  # answers come only when all samples of a batch have been asked for
    take(loader, 1)
    assert server.peak_in_flight >= 8


def test_what_is_corrupt_on_its_way_is_read_once_more(server, monkeypatch):
    dataset = open_dataset(f"{server.url}/{{000000..000001}}.tar", CHANNELS)
    origin = open_dataset(str(server.folder), CHANNELS)
    fetch, broken = RangeReader.fetch, []

    def every_second_time(reader, extents):
        broken.append(not (broken and broken[-1]))
        return [bytes(len(one)) if broken[-1] else one for one in fetch(reader, extents)]

    monkeypatch.setattr(RangeReader, "fetch", every_second_time)
    latents = np.empty((3, CHANNELS), np.float32)
    for read in (
        lambda data: data.read(119)[0].tolist(),
        lambda data: data.load(1, fetched=data.fetch([1]).get(1)).metadata,
        lambda data: data.metadata(2),
        lambda data: data.load_latents(4, latents, 1) or latents.tolist(),
    ):
        assert read(dataset) == read(origin)
    assert broken == 4 * [True, False]
    broken[:] = [True]
    samples, alone = dataset.fetch_with_latents([0, 1], [3, 4])
    assert (list(samples), list(alone)) == ([0, 1], [3, 4]) and broken == [True, False]
    for sample, data in alone.items():
        assert data == origin.read(sample)[0].astype(np.float16).tobytes()


def test_a_server_that_is_gone_is_no_corrupt_sample(server):
    loader = remote(server, **SKIP)
    rows = sum(len(inputs["sample_id"]) for inputs, _ in take(loader, 2))
    shutil.rmtree(server.folder)
    with pytest.raises(ValueError, match="http://127.0.0.1"):
        take(loader, 2)
    assert loader.corrupt_samples.reads == rows and not loader.corrupt_samples._corrupt


def test_signed_urls_are_the_same_tars_with_another_signature(server):
    open_dataset(str(server.folder), CHANNELS)  # sidecars, which no signature opens

    def signed(signature):
        urls = [f"{server.url}/{n:06d}.tar?X-Signature={signature}" for n in range(2)]
        return build(None, path=urls)

    first, renewed = signed("one"), signed("two")
    take(first, 7)
    renewed.load_state_dict(first.state_dict())
    for left, right in zip(take(first, 5), take(renewed, 5), strict=True):
        assert_same(joined([left]), joined([right]))
    assert "X-Signature" not in renewed.dataset.sample_id(0)


def test_a_sidecar_of_another_tar_is_not_taken(server, tmp_path):
    """One of equal size, as a rewritten tar's old index may be."""
    build(server.folder)
    other = make_shards(tmp_path / "other", 120, seed=7, channels=CHANNELS)
    flip_bits(other / "000000.tar", [3 * 59 + 2])
    shutil.copy(other / "000000.tar", server.folder)
    loader = remote(server, on_error="skip", max_corrupt_fraction=1.0)
    assert len(loader.dataset.problems) == 1  # found while the tar was indexed again
