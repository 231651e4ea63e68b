"""Shards are found and read wherever they lie: folders, patterns, web servers and S3; reads over http are right, many at
once, and each failure is one sentence: an outage is no corruption."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import boto3
import fsspec
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from tests.helpers.loaders import CHANNELS, SKIP, build, samples_of, take
from tests.helpers.sentences import sentence_of
from tools.harness.http_server import FolderServer
from tools.harness.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.heldout import heldout_shards
from torchtitan.models.dit_tts.data.range_reader import Extent, RangeReader
from torchtitan.models.dit_tts.data.storage import find_shards, open_source

TAR_BYTES = 400_000


@pytest.fixture(autouse=True)
def fast_and_direct(monkeypatch):
    """Retries wait milliseconds, and no proxy of the machine comes between."""
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(remote, "WAIT_FACTOR", 1.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def content_of(number: int, size: int = 100_000) -> bytes:
    return np.random.default_rng(number).bytes(size)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three shards, and files that are none of them."""
    folder = tmp_path / "train"
    (folder / "sub").mkdir(parents=True)
    for number in range(3):
        (folder / f"shard-{number:06d}.tar").write_bytes(content_of(number))
    (folder / "sub" / "deep.tar").write_bytes(b"x")
    (folder / ".hidden.tar").write_bytes(b"x")
    (folder / "shard-000000.tar.idx").write_bytes(b"x")
    return folder


@pytest.fixture
def server(folder):
    with FolderServer(folder.parent) as server:
        yield server


@pytest.fixture
def s3(folder, monkeypatch):
    """A bucket "corpus" with the shards of the folder below train/, found by the environment."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()  # the last test's server had another port
    client = boto3.client("s3")
    client.create_bucket(Bucket="corpus")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.upload_file(path, "corpus", f"train/{path.relative_to(folder)}")
    yield client
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


def test_local_folder_file_glob_and_braces(folder, monkeypatch):
    shards = [str(folder / f"shard-{number:06d}.tar") for number in range(3)]
    assert find_shards(str(folder)) == shards
    assert find_shards(shards[1]) == [shards[1]]
    assert find_shards(f"file://{shards[1]}") == [shards[1]]
    assert find_shards(str(folder / "shard-00000[02].tar")) == [shards[0], shards[2]]
    assert find_shards(str(folder / "shard-{000000..000002}.tar")) == shards
    assert find_shards(str(folder / "shard-{000002,000000}.tar")) == [shards[0], shards[2]]
    both = find_shards(str(folder.parent / "{train,train/sub}" / "*.tar"))
    assert both == [str(folder / "sub" / "deep.tar"), *shards]
    assert find_shards(str(folder / "**" / "*.tar")) == both
    monkeypatch.chdir(folder)
    assert find_shards("shard-00000{0..1}.tar") == shards[:2]
    assert find_shards(".") == shards
    os.rename(folder, folder.parent / "{a,b}")
    assert len(find_shards(str(folder.parent / "{a,b}"))) == 3


def test_local_mistakes_are_one_sentence(folder):
    os.unlink(folder / "shard-000001.tar")
    (folder / "empty").mkdir()
    recordings = folder.parent / "recordings"
    recordings.mkdir()
    (recordings / "one.wav").write_bytes(b"RIFF")
    for path, part in (
        ("", "path is empty"),
        (folder / "none", "/none' matches no .tar file"),
        (folder / "empty", "/empty' matches no .tar file"),
        ("a\0b", "matches no .tar file"),
        (folder / "shard-{000000..000003}.tar", f"'{folder}/shard-000001.tar' (of '"),
        (folder / "shard-{000000..000001.tar", "is not a pattern"),
        (folder.parent, f"so give {folder}"),
        ("outputs/data/spoken_digits/train", "scripts/from_scratch.sh prepares"),
        (recordings, "as titan-tts prepare SOURCE OUTPUT makes them of recordings"),
    ):
        assert part in sentence_of(find_shards, str(path))


@pytest.mark.parametrize(
    "path, held",
    [
        ("{}/ready/*/shard-*.tar", [True, False, True]),
        ("{}/ready/{{train,heldout}}", [True, False]),
        ("{}/linked", [True]),
        # Names alone are no proof: a speaker's folder, a trial.
        ("{}/valentin", [False]),
        ("{}/test", [False]),
        ("http/ready/heldout/shard-0.tar?signature=/a/b", [True]),
        ("http/test/shard-0.tar", [False]),
    ],
)
def test_held_out_shards_are_known_by_their_folder(tmp_path, path, held):
    for name in ("ready/train", "ready/heldout", "ready/dev", "valentin", "test"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "shard-0.tar").write_bytes(b"x")
    os.symlink(tmp_path / "ready" / "heldout", tmp_path / "linked")
    shards = find_shards(path.replace("http", "http://host").format(tmp_path))
    assert sorted(heldout_shards(shards)) == sorted(held)


def check_source(source, content: bytes):
    assert source.size == len(content)
    assert source.pread(10, 20) == content[20:30]
    assert source.pread(100, source.size - 7) == content[-7:]
    assert source.pread(100, source.size) == source.pread(5, source.size + 9) == b""
    assert source.pread(0, 5) == b""
    assert source.pread(source.size + 1, 0) == content
    # In steps that do not fit the blocks, and back to the start.
    for step in (997, 40_000):
        assert b"".join(source.pread(step, at) for at in range(0, len(content), step)) == content


def test_local_source(folder):
    path = folder / "shard-000001.tar"
    source = open_source(str(path))
    check_source(source, content_of(1))
    assert source.version == path.stat().st_mtime_ns and source.path == str(path)
    source.close()
    source.close()
    assert "cannot be opened (No such file" in sentence_of(open_source, str(folder / "x.tar"))
    (folder / "folder.tar").mkdir()
    os.mkfifo(folder / "fifo.tar")
    for name in ("folder.tar", "fifo.tar"):
        assert "is not a regular file" in sentence_of(open_source, str(folder / name))


def test_http_shards(folder, server):
    shards = [f"{server.url}/train/shard-{number:06d}.tar" for number in range(3)]
    assert find_shards(f"{server.url}/train") == shards
    assert find_shards(f"{server.url}/train/") == shards
    assert find_shards(f"{server.url}/train/*.tar") == shards
    signed = shards[0] + "?signature=%2Fx*y"
    assert find_shards(signed) == [signed]
    server.requests.clear()
    assert find_shards(f"{server.url}/train/shard-{{000000..000002}}.tar") == shards
    assert not server.requests
    assert "matches no .tar file" in sentence_of(find_shards, f"{server.url}/train/*.zip")
    assert "cannot be listed (not found)" in sentence_of(find_shards, f"{server.url}/none/")


def test_http_mistakes_are_one_sentence(server):
    missing = f"{server.url}/train/none.tar"
    assert sentence_of(open_source, missing) == (
        f"{missing}: cannot be opened (not found); check the URL"
    )
    url = f"{server.url}/train/shard-000001.tar"
    server.deny.add("shard-000001.tar")
    with_secrets = url.replace("http://", "http://user:password@") + "?signature=secret"
    sentence = sentence_of(open_source, with_secrets)
    assert sentence.startswith(f"{url}: cannot be opened (status 403: access denied); ")


@pytest.mark.parametrize("secret", ["HIDDEN", "HID/DEN"])
def test_a_password_in_a_bucket_s_url_is_not_repeated(secret):
    for call in (open_source, lambda url: find_shards(url.rpartition("/")[0])):
        sentence = sentence_of(call, f"s3://KEY:{secret}@corpus/train/shard-000001.tar")
        assert "a user or a password" in sentence
        assert not [part for part in ("KEY:", "HID", "DEN@") if part in sentence]


@pytest.mark.long
def test_s3(s3):
    shards = [f"s3://corpus/train/shard-{number:06d}.tar" for number in range(3)]
    assert find_shards("s3://corpus/train") == find_shards("s3://corpus/train/") == shards
    assert find_shards("s3://corpus/train/shard-*.tar") == shards
    assert find_shards("s3://corpus/train/shard-{000001..000002}.tar") == shards[1:]
    source = open_source(shards[1])
    check_source(source, content_of(1))
    first_version = source.version
    s3.put_object(Bucket="corpus", Key="train/shard-000001.tar", Body=content_of(5))
    assert remote.stat(shards[1], fresh=True) != (source.size, first_version)
    s3.put_object(Bucket="corpus", Key="train/shard-000003.tar", Body=b"x")
    assert len(find_shards("s3://corpus/train")) == 4  # no listing of before is kept

    assert "cannot be opened (not found)" in sentence_of(open_source, "s3://corpus/train/none.tar")
    assert "cannot be opened (not found)" in sentence_of(open_source, "s3://other/train/x.tar")
    assert "cannot be listed (not found)" in sentence_of(find_shards, "s3://other/train")


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
    """What the tars hold there."""
    return [tars[int(Path(e.path).stem)][e.start : e.stop] for e in extents]


def test_each_extent_is_requested_once_and_few_are_in_flight(range_server, tars):
    extents, reader = (
        extents_of(range_server, 0, 20) + extents_of(range_server, 1, 10),
        RangeReader(8),
    )
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


def test_changed_tars_and_servers_without_ranges(range_server, tars):
    extents, reader = extents_of(range_server, 0, 4), RangeReader()
    range_server.honour_ranges = False
    assert "the server ignores range requests" in sentence_of(reader.fetch, extents)
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


@pytest.mark.filterwarnings("error::UserWarning")
def test_same_batches_as_from_disk(served):
    local = build(served.folder)
    loader = over_http(served, num_workers=2)
    assert loader.dataset.fingerprint == local.dataset.fingerprint
    assert samples_of(take(loader, 40)) == samples_of(take(local, 40))


def test_the_samples_of_a_batch_are_requested_at_once(served):
    """And a sidecar beside the tar spares reading the tar."""
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


def test_signed_urls_are_the_same_tars_with_another_signature(served):
    open_dataset(str(served.folder), CHANNELS)  # sidecars, which no signature opens

    def signed(signature):
        urls = [f"{served.url}/{n:06d}.tar?X-Signature={signature}" for n in range(2)]
        return build(None, path=urls)

    first, renewed = signed("one"), signed("two")
    take(first, 7)
    renewed.load_state_dict(first.state_dict())
    assert samples_of(take(first, 5)) == samples_of(take(renewed, 5))
    assert "X-Signature" not in renewed.dataset.sample_id(0)


def test_a_sidecar_of_another_tar_is_not_taken(served, tmp_path):
    """One of equal size, as a rewritten tar's old index may be."""
    build(served.folder)
    other = make_shards(tmp_path / "other", 120, seed=7, channels=CHANNELS)
    flip_bits(other / "000000.tar", [3 * 59 + 2])
    shutil.copy(other / "000000.tar", served.folder)
    loader = over_http(served, on_error="skip", max_corrupt_fraction=1.0)
    assert len(loader.dataset.problems) == 1  # found while the tar was indexed again
