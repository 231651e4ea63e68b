"""Text features on disk: what the encoder gives, made once, found only where they fit, checked when read."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.helpers.encoded_shards import (
    CHANNELS,
    SAMPLES,
    SHARDS,
    Made,
    flip_last_byte,
    write_shards,
)
from tests.helpers.sentences import refused
from titan_tts.prepare import encode_text
from tools.harness.http_server import FolderServer
from tools.harness.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.text import feature_store
from torchtitan.models.dit_tts.text.feature_store import (
    feature_kind,
    find_feature_files,
    open_text_features,
    with_stored_fingerprint,
)
from torchtitan.models.dit_tts.text.hf_encoder import find_source

NOTHING = [None] * SHARDS
FILES = [f"{shard:06d}.safetensors" for shard in range(SHARDS)]


@pytest.fixture(scope="module")
def gemma(checkpoints, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("named")
    return Path(shutil.copytree(checkpoints["t5gemma2"], folder / "tiny-gemma"))


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "train")


def test_features_are_what_the_encoder_gives(shards, gemma, checkpoints):
    """In files that the library reads, one folder for each encoder and precision."""
    kinds = [
        *(Made(shards, gemma, cache_dtype=dtype) for dtype in ("float32", "bfloat16", "float16")),
        Made(shards, gemma, dtype="bfloat16"),
        Made(shards, checkpoints["t5"]),
    ]
    for made in kinds:
        assert find_feature_files(made.dataset, made.kind) == NOTHING
        dtypes = f"{made.encoder.dtype} --text-feature-dtype {made.kind.stored_dtype}"
        words = ("missing for 3 of 3 shards", "000000.tar", f" --text-dtype {dtypes} and")
        refused(lambda: open_text_features(made.dataset, made.kind), *words)
        made.make()
    assert len(os.listdir(shards / "text_features")) == len(kinds)
    for made in kinds:
        features = open_text_features(made.dataset, made.kind)
        assert (features.width, features.torch_dtype) == (made.module.width, made.kind.torch_dtype)
        for shard in range(SHARDS):
            samples = np.flatnonzero(made.dataset.shard == shard).tolist()
            ids = [made.ids(sample) for sample in samples]
            assert features.tokens[samples].tolist() == list(map(len, ids))
            expected = [each.to(features.torch_dtype) for each in made.module.encode(ids)]
            assert torch.equal(
                safetensors.torch.load_file(made.path(shard))["features"], torch.cat(expected)
            )
            for sample, own in zip(samples, expected, strict=True):
                assert torch.equal(made.read(sample, features), own) and own.std() > 0.1


def test_features_that_fit_no_longer_are_not_found(shards, gemma, tmp_path):
    made = Made(shards, gemma)
    made.make()
    for change in ("encoder_fingerprint", "text_fingerprint"):
        other = replace(made.kind, **{change: "0123456789abcdef"})
        folder = made.path(0).parent
        shutil.copytree(folder, folder.with_name(other.folder_name))  # not even under its name
        assert find_feature_files(made.dataset, other) == NOTHING
    # Another shard of the same name.
    new = make_shards(tmp_path / "other", SAMPLES, seed=8, channels=CHANNELS, shards=SHARDS)
    shutil.copy(new / "000001.tar", shards / "000001.tar")
    changed = Made(shards, gemma)
    found = find_feature_files(changed.dataset, changed.kind)
    assert [file is None for file in found] == [False, True, False]
    changed.make()
    changed.read(15)


def test_without_the_weights_the_stored_features_are_taken(shards, gemma, tmp_path):
    made = Made(shards, gemma)
    made.make()
    moved = shutil.copytree(gemma, tmp_path / "elsewhere" / gemma.name)
    (moved / "model.safetensors").unlink()
    encoder = replace(made.encoder, model=str(moved))
    kind = feature_kind(encoder, made.tokenizer, find_source(str(moved)))
    assert kind.encoder_fingerprint is None
    stored = with_stored_fingerprint(made.dataset, kind)
    assert stored.encoder_fingerprint == made.kind.encoder_fingerprint
    hidden = made.path(0).rename(made.path(0).with_suffix(".away"))
    assert with_stored_fingerprint(made.dataset, kind) == stored
    hidden.rename(made.path(0))
    features = open_text_features(made.dataset, stored)
    assert torch.equal(made.read(3, features), made.read(3))
    for other in (
        {"text_fingerprint": "0123456789abcdef"},
        {"encoder_dtype": "bfloat16"},
        {"stored_dtype": "float16"},
        {"model": "/elsewhere/tiny"},
    ):
        other_kind = replace(kind, **other)
        assert with_stored_fingerprint(made.dataset, other_kind) == other_kind
        assert find_feature_files(made.dataset, other_kind) == NOTHING
    # With a second state of the encoder nobody can say which is right.
    made.kind = replace(made.kind, encoder_fingerprint="fedcba9876543210")
    made.make([0])
    refused(lambda: with_stored_fingerprint(made.dataset, kind), "two versions of the encoder")


def test_corrupt_features_are_noticed(shards, gemma):
    made = Made(shards, gemma, cache_dtype="bfloat16")
    made.make()
    complete = made.path(1).read_bytes()
    flip_last_byte(made.path(1))
    features = open_text_features(made.dataset, made.kind)
    (*valid, corrupt) = np.flatnonzero(made.dataset.shard == 1).tolist()
    for sample in valid:
        made.read(sample, features)
    with pytest.raises(CorruptSampleError, match="000001.safetensors differ from what"):
        made.read(corrupt, features)
    # A corrupt header or table is as good as no file.
    header = 8 + int.from_bytes(complete[:8], "little")
    for position in (0, complete.index(b"F16"), header + 3, None):
        data = bytearray(complete if position is not None else complete[:-4])
        data[position or 0] ^= 0x11 if position is not None else 0
        made.path(1).write_bytes(data)
        found = find_feature_files(made.dataset, made.kind)
        assert [file is None for file in found] == [False, True, False]
    made.make()
    assert made.path(1).read_bytes() == complete


@pytest.mark.long
def test_what_cannot_be_made_is_not_there(shards, gemma):
    made = Made(shards, gemma, cache_dtype="float16")
    with torch.no_grad():
        made.module.core.norm.weight.fill_(1e6)
    refused(made.make, "not finite in float16", "cache_dtype")
    flip_bits(shards / "000000.tar", [3 * 4 + 2])  # the JSON of the fifth sample
    with pytest.raises(CorruptSampleError, match="its JSON"):
        Made(shards, gemma).make([0])
    assert not made.path(0).exists() and not Made(shards, gemma).path(0).exists()


def test_texts_that_are_too_long_have_no_features(shards, gemma, monkeypatch):
    monkeypatch.setattr(feature_store, "LONGEST_TEXT", 5)
    made = Made(shards, gemma)
    made.make()
    features = open_text_features(made.dataset, made.kind)
    for sample in np.flatnonzero(features.tokens <= 5).tolist():
        expected = made.module.encode([made.ids(sample)])[0]
        torch.testing.assert_close(made.read(sample, features), expected, rtol=0, atol=1e-4)
        row = np.empty((len(expected) - 1, features.width), np.float32)
        refused(lambda: features.read(sample, row), f"{len(expected)} features, but at most")
    assert {5, 6} <= set(features.tokens.tolist())


def test_a_stopped_job_goes_on_with_what_is_missing(shards, gemma, monkeypatch):
    made = Made(shards, gemma)
    write, calls = encode_text.write_feature_file, []

    def fail_in_the_second_shard(path, *args):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(path, *args)

    monkeypatch.setattr(encode_text, "write_feature_file", fail_in_the_second_shard)
    with pytest.raises(KeyboardInterrupt):
        made.make()
    folder = made.path(0).parent
    assert os.listdir(folder) == FILES[:1]
    before = os.stat(made.path(0)).st_mtime_ns
    made.make()
    assert os.stat(made.path(0)).st_mtime_ns == before and len(calls) == 4
    assert sorted(os.listdir(folder)) == FILES


def test_features_are_beside_shards_on_this_machine(shards, gemma):
    with FolderServer(shards.parent) as server:
        made = Made(f"{server.url}/train/000000.tar", gemma)
        refused(lambda: open_text_features(made.dataset, made.kind), "beside shards", "copy")
