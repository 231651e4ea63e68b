"""Text features in files: what the encoder gives, found only where they fit, made once, whole."""

import errno
import fcntl
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.encoded_shards import (
    CHANNELS,
    SAMPLES,
    SHARDS,
    Made,
    flip_last_byte,
    write_shards,
)
from tests.helpers.http_server import FolderServer
from tests.helpers.pretrained_checkpoints import write_tiny_t5, write_tiny_t5gemma2
from tests.helpers.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text import encode_features
from torchtitan.models.dit_tts.text import feature_store as feature_file
from torchtitan.models.dit_tts.text.encode_features import feature_kind
from torchtitan.models.dit_tts.text.feature_builder import (
    find_feature_files,
    open_text_features,
)
from torchtitan.models.dit_tts.text.hf_encoder import find_source


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return write_tiny_t5gemma2(tmp_path_factory.mktemp("encoders") / "tiny-gemma")


@pytest.fixture
def model(gemma, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(gemma, tmp_path / "tiny-gemma"))


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "train")


@pytest.mark.long
@pytest.mark.parametrize("write", [write_tiny_t5gemma2, write_tiny_t5])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_features_are_what_the_encoder_gives(shards, tmp_path, write, stored):
    made = Made(shards, write(tmp_path / "model"), cache_dtype=stored)
    made.make()
    features = open_text_features(made.dataset, made.kind)
    assert features.torch_dtype == getattr(torch, stored)
    assert features.width == made.module.width
    for shard in range(SHARDS):
        samples = np.flatnonzero(made.dataset.shard == shard).tolist()
        ids = [made.ids(sample) for sample in samples]
        assert features.tokens[samples].tolist() == list(map(len, ids))
        for sample, expected in zip(samples, made.module.encode(ids), strict=True):
            found = made.read(sample, features)
            assert torch.equal(found, expected.to(features.torch_dtype))
            (alone,) = made.module.encode([made.ids(sample)])
            tolerance = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}[stored]
            torch.testing.assert_close(found.float(), alone, rtol=tolerance, atol=tolerance)
            assert alone.std() > 0.1


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_other_readers_read_the_file(shards, gemma, stored):
    import safetensors
    import safetensors.torch

    made = Made(shards, gemma, cache_dtype=stored)
    made.make([1])
    loaded = safetensors.torch.load_file(made.path(1))
    samples = np.flatnonzero(made.dataset.shard == 1).tolist()
    expected = torch.cat(made.module.encode([made.ids(sample) for sample in samples]))
    assert torch.equal(loaded["features"], expected.to(getattr(torch, stored)))
    assert loaded["tokens"].dtype == torch.int32 and loaded["hashes"].dtype == torch.uint64
    assert loaded["ends"].tolist() == loaded["tokens"].cumsum(0).tolist()
    with safetensors.safe_open(made.path(1), "np") as file:
        said = file.metadata()
    assert said["model"] == str(gemma) and said["stored_dtype"] == stored
    assert said["encoder_fingerprint"] == made.module.source.fingerprint("float32")
    assert said["shard_digest"] == made.dataset.shard_digests[1]


@pytest.mark.long
def test_several_kinds_lie_beside_each_other(shards, gemma, tmp_path):
    kinds = [
        Made(shards, gemma),
        Made(shards, gemma, cache_dtype="float16"),
        Made(shards, gemma, dtype="bfloat16"),
        Made(shards, write_tiny_t5(tmp_path / "t5")),
    ]
    for made in kinds:
        assert find_feature_files(made.dataset, made.kind) == [None] * SHARDS
        with pytest.raises(
            InputError, match="missing for 3 of 3 shards, the first is .*000000.tar"
        ):
            open_text_features(made.dataset, made.kind)
        made.make()
    assert len(os.listdir(shards / "text_features")) == len(kinds)
    for made in kinds:
        assert open_text_features(made.dataset, made.kind).kind == made.kind


def test_other_weights_are_refused(shards, model):
    Made(shards, model).make()
    write_tiny_t5gemma2(model, seed=1)
    changed = Made(shards, model)
    with pytest.raises(InputError, match="made with other encoder weights .* delete .*tiny-gemma-"):
        find_feature_files(changed.dataset, changed.kind)
    shutil.rmtree(shards / "text_features")
    assert find_feature_files(changed.dataset, changed.kind) == [None] * SHARDS


def test_another_tokenizer_is_refused(shards, gemma):
    made = Made(shards, gemma)
    made.make()
    kind = replace(made.kind, text_fingerprint="0123456789abcdef")
    for known in (made.kind.encoder_fingerprint, None):
        with pytest.raises(InputError, match="other tokenizer .*0123456789abcdef now"):
            find_feature_files(made.dataset, replace(kind, encoder_fingerprint=known))


def test_a_changed_shard_is_refused(shards, gemma, tmp_path):
    Made(shards, gemma).make()
    other = make_shards(tmp_path / "other", 30, seed=8, channels=CHANNELS, shards=SHARDS)
    shutil.copy(other / "000001.tar", shards / "000001.tar")
    (shards / "000001.tar.idx").unlink()
    changed = Made(shards, gemma)
    with pytest.raises(
        InputError, match="000001.safetensors: text features of another .*000001.tar"
    ):
        find_feature_files(changed.dataset, changed.kind)
    changed.path(1).unlink()
    found = find_feature_files(changed.dataset, changed.kind)
    assert [file is None for file in found] == [False, True, False]


def test_copied_data_has_its_features(shards, gemma, tmp_path):
    Made(shards, gemma).make()
    copied = Made(Path(shutil.copytree(shards, tmp_path / "copy")), gemma)
    assert len(open_text_features(copied.dataset, copied.kind).tokens) == 30


def test_without_the_weights_the_files_are_taken(shards, model):
    made = Made(shards, model)
    made.make()
    expected = made.read(3)
    (model / "model.safetensors").unlink()
    kind = feature_kind(made.encoder, made.tokenizer, find_source(str(model)))
    assert kind.encoder_fingerprint is None
    features = open_text_features(made.dataset, kind)
    assert features.encoder_fingerprint == made.kind.encoder_fingerprint
    assert torch.equal(made.read(3, features), expected)
    # A file of the same encoder in another state: nobody can say which of them is right.
    other = replace(made.kind, encoder_fingerprint="fedcba9876543210")
    wrong = made.path(2).parent.with_name(other.folder_name)
    wrong.mkdir()
    tokens = np.ones(10, np.int32)
    features = (torch.zeros(1, 64) for _ in range(10))
    feature_file.write_feature_file(
        str(wrong / made.path(2).name),
        other,
        made.dataset.shard_digests[2],
        tokens,
        tokens > 0,
        64,
        features,
    )
    with pytest.raises(InputError, match="two states of the encoder"):
        open_text_features(made.dataset, kind)
    made.path(2).unlink()
    with pytest.raises(InputError, match="two states of the encoder"):
        open_text_features(made.dataset, kind)


def test_without_the_weights_a_moved_model_has_its_files(shards, model, tmp_path):
    made = Made(shards, model)
    made.make()
    expected = made.read(3)
    (model / "model.safetensors").unlink()
    moved = shutil.copytree(model, tmp_path / "elsewhere" / model.name)
    encoder = replace(made.encoder, model=str(moved))
    kind = feature_kind(encoder, made.tokenizer, find_source(str(moved)))
    assert kind.model != made.kind.model and kind.encoder_fingerprint is None
    assert torch.equal(made.read(3, open_text_features(made.dataset, kind)), expected)
    for other in (
        {"text_fingerprint": "0123456789abcdef"},
        {"encoder_dtype": "bfloat16"},
        {"stored_dtype": "float16"},
        {"model": "/elsewhere/tiny"},
        {"encoder_fingerprint": "0123456789abcdef"},  # its weights are here, and of another encoder
    ):
        assert find_feature_files(made.dataset, replace(kind, **other)) == [None] * SHARDS
    # Those of a model of the same name at a third place: neither is the one that is asked for.
    made.kind = replace(
        made.kind, model="/third/tiny-gemma", encoder_fingerprint="fedcba9876543210"
    )
    made.make([2])
    with pytest.raises(InputError, match="two states of the encoder"):
        open_text_features(made.dataset, kind)
    taken = find_feature_files(made.dataset, replace(kind, model=str(model)))
    assert [file.kind.model for file in taken] == [str(model)] * SHARDS


def test_damaged_features_are_noticed(shards, gemma):
    made = Made(shards, gemma, cache_dtype="bfloat16")
    made.make()
    flip_last_byte(made.path(1))
    features = open_text_features(made.dataset, made.kind)
    (*sound, damaged) = np.flatnonzero(made.dataset.shard == 1).tolist()
    for sample in sound:
        made.read(sample, features)
    with pytest.raises(
        CorruptSampleError, match="text features in .*000001.safetensors are not what"
    ):
        made.read(damaged, features)


@pytest.mark.parametrize("position", [0, 9, 300, -1])
def test_a_damaged_header_or_table_is_as_good_as_no_file(shards, gemma, position):
    made = Made(shards, gemma)
    made.make([0])
    data = bytearray(made.path(0).read_bytes())
    tables = int.from_bytes(data[:8], "little") + 8
    data[position if position >= 0 else tables + 3] ^= 0x11
    made.path(0).write_bytes(data)
    assert find_feature_files(made.dataset, made.kind)[0] is None
    made.path(0).write_bytes(data[:-4])
    assert find_feature_files(made.dataset, made.kind)[0] is None
    made.make()
    made.read(0)


def test_a_sample_that_is_damaged_when_features_are_made(shards, gemma):
    made = Made(shards, gemma)
    flip_bits(shards / "000000.tar", [3 * 4 + 2])  # the JSON of the fifth sample
    with pytest.raises(CorruptSampleError, match="its JSON"):
        made.make([0])
    assert not made.path(0).exists()
    made.make(on_error="skip")
    features = open_text_features(made.dataset, made.kind)
    assert features.tokens[4] == 0
    with pytest.raises(CorruptSampleError, match="are left out"):
        made.read(4, features)
    for sample in (3, 5, 29):
        made.read(sample, features)


def test_features_that_the_dtype_cannot_hold(shards, gemma):
    made = Made(shards, gemma, cache_dtype="float16")
    with torch.no_grad():
        made.module.core.norm.weight.fill_(1e6)
    with pytest.raises(
        InputError, match="not finite in float16; choose another .encoder. cache_dtype"
    ):
        made.make()


def test_a_killed_start_goes_on_with_what_is_missing(shards, gemma, monkeypatch):
    made = Made(shards, gemma)
    encode, calls = made.module.encode, []

    def fail_in_the_second_shard(texts):
        calls.append(texts)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(texts)

    monkeypatch.setattr(made.module, "encode", fail_in_the_second_shard)
    with pytest.raises(KeyboardInterrupt):
        made.make()
    monkeypatch.undo()
    folder = made.path(0).parent
    assert os.listdir(folder) == ["000000.safetensors"]
    # A killed process cannot even tidy up; others may be at work, or just begin.
    left = [folder / f".000001.safetensors.{name}.tmp" for name in ("dead", "alive", "young")]
    for path in left:
        path.write_bytes(b"half")
    for path in left[:2]:
        os.utime(path, (time.time() - 60,) * 2)
    alive = open(left[1], "r+b")
    fcntl.flock(alive, fcntl.LOCK_EX)
    files = find_feature_files(made.dataset, made.kind)
    missing = [number for number, file in enumerate(files) if file is None]
    assert missing == [1, 2]
    before = os.stat(made.path(0)).st_mtime_ns
    made.make(missing)
    assert os.stat(made.path(0)).st_mtime_ns == before
    whole = [f"00000{n}.safetensors" for n in range(3)]
    assert sorted(os.listdir(folder)) == [left[1].name, left[2].name, *whole]
    made.read(29)
    alive.close()


def test_a_read_only_folder_uses_the_cache(shards, gemma, monkeypatch):
    made = Made(shards, gemma)
    makedirs = os.makedirs

    def refuse(path, *args, **options):  # as a read-only disk does; rights do not bind root
        if str(path).startswith(str(shards)):
            raise OSError(errno.EROFS, "read-only")
        makedirs(path, *args, **options)

    monkeypatch.setattr(encode_features.os, "makedirs", refuse)
    made.make()
    assert sorted(path.suffix for path in shards.iterdir()) == [".idx"] * 3 + [".tar"] * 3
    cached = Path(os.environ["XDG_CACHE_HOME"], "titan-tts/text_features", made.kind.folder_name)
    assert len(os.listdir(cached)) == SHARDS
    made.read(29)

    def full(path, *args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    shutil.rmtree(cached)
    monkeypatch.setattr(encode_features.os, "makedirs", full)
    with pytest.raises(InputError, match="cannot be written .No space left.*; make room"):
        made.make()


def test_a_shard_is_encoded_in_parts(shards, gemma, monkeypatch):
    made = Made(shards, gemma)
    made.make()
    whole = [made.read(sample) for sample in range(SAMPLES)]
    shutil.rmtree(shards / "text_features")
    monkeypatch.setattr(encode_features, "_BYTES_AT_ONCE", 30 * 64 * 4)  # 30 tokens
    monkeypatch.setattr(encode_features, "_TEXTS_AT_ONCE", 4)
    encode, parts = made.module.encode, []

    def noted(texts):
        parts.append(list(map(len, texts)))
        return encode(texts)

    monkeypatch.setattr(made.module, "encode", noted)
    made.make()
    assert all(sum(part) <= 30 or len(part) == 1 for part in parts) and len(parts) > 6
    for sample, expected in enumerate(whole):
        torch.testing.assert_close(made.read(sample), expected, rtol=1e-4, atol=1e-4)


def test_features_of_remote_shards_are_in_the_cache(shards, gemma):
    with FolderServer(shards.parent) as server:
        url = f"{server.url}/train/" + "{000000..000002}.tar"
        made = Made(url, gemma)
        assert made.dataset.is_remote(0)
        made.make()
        expected = made.module.encode([made.ids(29)])[0]
        torch.testing.assert_close(made.read(29), expected, rtol=1e-4, atol=1e-4)
        assert len(open_text_features(Made(url, gemma).dataset, made.kind).tokens) == 30
    assert not (shards / "text_features").exists()
