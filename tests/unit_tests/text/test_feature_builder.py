"""Making text features: complete files, made once, by one job or several."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.encoded_shards import SAMPLES, SHARDS, Made, write_shards
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tools.harness.http_server import FolderServer
from tools.harness.synthetic import flip_bits
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text import feature_builder
from torchtitan.models.dit_tts.text.feature_store import find_feature_files, open_text_features

FILES = [f"{shard:06d}.safetensors" for shard in range(SHARDS)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return write_tiny_t5gemma2(tmp_path_factory.mktemp("encoders") / "tiny-gemma")


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "train")


def test_a_sample_that_is_corrupt_when_features_are_made(shards, gemma):
    made = Made(shards, gemma)
    flip_bits(shards / "000000.tar", [3 * 4 + 2])  # the JSON of the fifth sample
    with pytest.raises(CorruptSampleError, match="its JSON"):
        made.make([0])
    assert not made.path(0).exists()


def test_features_that_the_dtype_cannot_hold(shards, gemma):
    made = Made(shards, gemma, cache_dtype="float16")
    with torch.no_grad():
        made.module.core.norm.weight.fill_(1e6)
    with pytest.raises(InputError, match="not finite in float16.*cache_dtype"):
        made.make()


def test_a_stopped_job_goes_on_with_what_is_missing(shards, gemma, monkeypatch):
    made = Made(shards, gemma)
    encode_each, calls = made.module.encode_each, []

    def fail_in_the_second_shard(texts):
        calls.append(texts)
        yield from list(encode_each(texts))[: 5 if len(calls) == 2 else None]
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(made.module, "encode_each", fail_in_the_second_shard)
    with pytest.raises(KeyboardInterrupt):
        made.make()
    folder = made.path(0).parent
    assert os.listdir(folder) == FILES[:1]
    files = find_feature_files(made.dataset, made.kind)
    assert [file is None for file in files] == [False, True, True]
    before = os.stat(made.path(0)).st_mtime_ns
    left, alive = folder / ".killed.tmp", folder / ".another-job.tmp"
    left.touch()
    alive.touch()
    os.utime(left, (0, 0))
    made.make()
    assert not left.exists() and alive.exists()
    alive.unlink()
    assert os.stat(made.path(0)).st_mtime_ns == before and len(calls) == 4
    assert sorted(os.listdir(folder)) == FILES
    made.read(29)


def test_a_read_only_folder_uses_the_cache(shards, gemma, monkeypatch):
    made = Made(shards, gemma)
    new_file = feature_builder.new_feature_file

    def refuse(path, *args):  # as a read-only disk does; rights do not bind root
        if path.startswith(str(shards)):
            raise OSError(errno.EROFS, "read-only")
        return new_file(path, *args)

    monkeypatch.setattr(feature_builder, "new_feature_file", refuse)
    made.make()
    assert sorted(path.suffix for path in shards.iterdir()) == [".idx"] * 3 + [".tar"] * 3
    cached = Path(os.environ["XDG_CACHE_HOME"], "titan-tts/text_features", made.kind.folder_name)
    assert len(os.listdir(cached)) == SHARDS
    made.read(29)

    def full(path, *args):
        raise OSError(errno.ENOSPC, "No space left on device")

    shutil.rmtree(cached)
    monkeypatch.setattr(feature_builder, "new_feature_file", full)
    with pytest.raises(InputError, match="cannot be written .No space left.*; make room"):
        made.make()


def test_features_of_remote_shards_are_in_the_cache(shards, gemma):
    with FolderServer(shards.parent) as server:
        url = f"{server.url}/train/" + "{000000..000002}.tar"
        made = Made(url, gemma)
        assert made.dataset.is_remote(0)
        made.make()
        expected = made.module.encode([made.ids(29)])[0]
        torch.testing.assert_close(made.read(29), expected, rtol=1e-4, atol=1e-4)
        assert len(open_text_features(Made(url, gemma).dataset, made.kind).tokens) == SAMPLES
    assert not (shards / "text_features").exists()


def test_the_first_of_two_jobs_keeps_its_files(shards, gemma, monkeypatch):
    """It reads them by now, and another machine's features differ in a few bits."""
    first, second = Made(shards, gemma), Made(shards, gemma)
    encode_each, begun, training = second.module.encode_each, [], []

    def later_and_on_another_machine(texts):
        begun.append(texts)
        if not training:
            first.make()
            training.append(open_text_features(first.dataset, first.kind))
        for number, features in encode_each(texts):
            yield number, features * (1 + 1e-6)

    monkeypatch.setattr(second.module, "encode_each", later_and_on_another_machine)
    second.make()
    for sample in range(SAMPLES):
        first.read(sample, training[0])
    assert len(begun) == 1  # the other shards had their files when their turn came
    assert sorted(os.listdir(first.path(0).parent)) == FILES
