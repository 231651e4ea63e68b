"""Text features on disk: what the encoder gives, found only where they fit, checked when read."""

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
from tests.helpers.pretrained_checkpoints import write_tiny_t5, write_tiny_t5gemma2
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.feature_builder import feature_kind
from torchtitan.models.dit_tts.text.feature_store import (
    find_feature_files,
    open_text_features,
    with_stored_fingerprint,
)
from torchtitan.models.dit_tts.text.hf_encoder import find_source

NOTHING = [None] * SHARDS


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return write_tiny_t5gemma2(tmp_path_factory.mktemp("encoders") / "tiny-gemma")


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "train")


@pytest.fixture
def made(shards, gemma) -> Made:
    made = Made(shards, gemma)
    made.make()
    return made


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
            assert found.std() > 0.1


def test_the_library_reads_the_file(shards, gemma):
    made = Made(shards, gemma, cache_dtype="bfloat16")
    made.make([1])
    loaded = safetensors.torch.load_file(made.path(1))
    samples = np.flatnonzero(made.dataset.shard == 1).tolist()
    expected = torch.cat(made.module.encode([made.ids(sample) for sample in samples]))
    assert torch.equal(loaded["features"], expected.to(torch.bfloat16))
    assert loaded["tokens"].tolist() == [len(made.ids(sample)) for sample in samples]


@pytest.mark.long
def test_several_kinds_lie_beside_each_other(shards, gemma, tmp_path):
    kinds = [
        Made(shards, gemma),
        Made(shards, gemma, cache_dtype="float16"),
        Made(shards, gemma, dtype="bfloat16"),
        Made(shards, write_tiny_t5(tmp_path / "t5")),
    ]
    for made in kinds:
        assert find_feature_files(made.dataset, made.kind) == NOTHING
        with pytest.raises(InputError, match="missing for 3 of 3 shards.*000000.tar"):
            open_text_features(made.dataset, made.kind)
        made.make()
    assert len(os.listdir(shards / "text_features")) == len(kinds)
    for made in kinds:
        assert find_feature_files(made.dataset, made.kind)[0].kind == made.kind


def test_features_of_other_weights_or_another_tokenizer_are_not_found(made):
    for change in ("encoder_fingerprint", "text_fingerprint"):
        other = replace(made.kind, **{change: "0123456789abcdef"})
        assert find_feature_files(made.dataset, other) == NOTHING
        folder = made.path(0).parent
        shutil.copytree(folder, folder.with_name(other.folder_name))  # not even under its name
        assert find_feature_files(made.dataset, other) == NOTHING


def test_features_of_another_shard_of_the_name_are_made_again(made, shards, gemma, tmp_path):
    other = make_shards(tmp_path / "other", SAMPLES, seed=8, channels=CHANNELS, shards=SHARDS)
    shutil.copy(other / "000001.tar", shards / "000001.tar")
    changed = Made(shards, gemma)
    found = find_feature_files(changed.dataset, changed.kind)
    assert [file is None for file in found] == [False, True, False]
    changed.make()
    changed.read(15)


def test_without_the_weights_the_stored_features_are_taken(made, gemma, tmp_path):
    expected = made.read(3)
    moved = shutil.copytree(gemma, tmp_path / "elsewhere" / gemma.name)
    (moved / "model.safetensors").unlink()
    kind = feature_kind(
        replace(made.encoder, model=str(moved)), made.tokenizer, find_source(str(moved))
    )
    assert kind.encoder_fingerprint is None
    stored = with_stored_fingerprint(made.dataset, kind)
    assert stored.encoder_fingerprint == made.kind.encoder_fingerprint
    assert torch.equal(made.read(3, open_text_features(made.dataset, stored)), expected)
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
    with pytest.raises(InputError, match="two states of the encoder"):
        with_stored_fingerprint(made.dataset, kind)


def test_corrupt_features_are_noticed(shards, gemma):
    made = Made(shards, gemma, cache_dtype="bfloat16")
    made.make()
    flip_last_byte(made.path(1))
    features = open_text_features(made.dataset, made.kind)
    (*valid, corrupt) = np.flatnonzero(made.dataset.shard == 1).tolist()
    for sample in valid:
        made.read(sample, features)
    with pytest.raises(CorruptSampleError, match="000001.safetensors are not what"):
        made.read(corrupt, features)


@pytest.mark.parametrize("position", ["length", "header", "tables", "end"])
def test_a_corrupt_header_or_table_is_as_good_as_no_file(shards, gemma, position):
    made = Made(shards, gemma, cache_dtype="bfloat16")
    made.make([0])
    data = bytearray(made.path(0).read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    if position == "end":
        del data[-4:]
    else:
        data[{"length": 0, "header": data.index(b"F16"), "tables": header + 3}[position]] ^= 0x11
    made.path(0).write_bytes(data)
    assert find_feature_files(made.dataset, made.kind) == NOTHING
    made.make()
    made.read(0)
