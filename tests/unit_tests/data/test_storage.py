"""Shards are found and read wherever they lie: folders, patterns, web servers and S3."""

import os
from pathlib import Path

import boto3
import fsspec
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from tests.helpers.sentences import sentence_of
from tools.harness.http_server import FolderServer
from torchtitan.models.dit_tts.data.heldout import heldout_shards
from torchtitan.models.dit_tts.data.range_reader import Extent, RangeReader
from torchtitan.models.dit_tts.data.storage import find_shards, open_source

pytestmark = pytest.mark.usefixtures("fast_and_direct")


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
    assert find_shards("s3://corpus/train/shard-*.tar") == shards
    assert find_shards("s3://corpus/train/shard-{000001..000002}.tar") == shards[1:]
    assert find_shards("s3://corpus/train") == find_shards("s3://corpus/train/") == shards
    source = open_source(shards[1])
    check_source(source, content_of(1))
    first_version = source.version
    s3.put_object(Bucket="corpus", Key="train/shard-000001.tar", Body=content_of(5))
    reader = RangeReader()
    reader.suspect(shards[1])  # whose listing of before is of no use
    extent = Extent(shards[1], source.size, first_version, 0, 9)
    assert "has another content" in sentence_of(reader.fetch, [extent])
    s3.put_object(Bucket="corpus", Key="train/shard-000003.tar", Body=b"x")
    assert len(find_shards("s3://corpus/train")) == 4  # no listing of before is kept

    assert "cannot be opened (not found)" in sentence_of(open_source, "s3://corpus/train/none.tar")
    assert "cannot be opened (not found)" in sentence_of(open_source, "s3://other/train/x.tar")
    assert "cannot be listed (not found)" in sentence_of(find_shards, "s3://other/train")
