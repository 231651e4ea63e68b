"""Stored text features in training: found on all ranks, and read by the loader."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.encoded_shards import SAMPLES, Made, flip_last_byte, write_shards
from tests.helpers.loaders import config
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tests.helpers.small_models import one_rank
from torchtitan.models.dit_tts.config.job_config import Encoder, JobConfig
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra import text_encoder
from torchtitan.models.dit_tts.infra.text_encoder import build_frozen_encoder, stored_text_features
from torchtitan.models.dit_tts.text import feature_store
from torchtitan.models.dit_tts.text.feature_store import open_text_features
from torchtitan.models.dit_tts.text.hf_tokenizer import SubwordTokenizer
from torchtitan.models.dit_tts.train_spec import build_agreed_dataloader


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return write_tiny_t5gemma2(tmp_path_factory.mktemp("encoders") / "tiny-gemma")


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "train")


def with_conditions(made: Made) -> SubwordTokenizer:
    vocabulary = replace(
        made.tokenizer.vocabulary,
        conditioning={"speaker": ("s0", "s1", "s2", "s3"), "duration": tuple("0123456789")},
        duration_token_seconds=1.0,
    )
    return SubwordTokenizer(vocabulary, made.tokenizer.text)


def job(folder, encoder: Encoder, tmp_path, **changes):
    made = config(folder, **{"local": 8, "total": 8} | changes)
    made.encoder = encoder
    made.job = SimpleNamespace(dump_folder=str(tmp_path / "run"))
    return made


@pytest.mark.parametrize(("stored", "workers"), [("float32", 0), ("bfloat16", 2)])
def test_the_loader_puts_features_behind_the_conditions(shards, gemma, tmp_path, stored, workers):
    made = Made(shards, gemma, cache_dtype=stored)
    made.make()
    tokenizer = with_conditions(made)
    settings = job(shards, made.encoder, tmp_path, num_workers=workers)

    def find(dataset):
        return open_text_features(dataset, made.kind)

    plain = build_dataloader(1, 0, tokenizer, settings)
    loader = build_dataloader(1, 0, tokenizer, settings, find)
    assert plain.features is None and loader.features.width == 64
    assert loader.state_dict() == plain.state_dict() and loader.policy == plain.policy
    number = {made.dataset.sample_id(sample): sample for sample in range(SAMPLES)}
    both, expected_both = iter(loader), iter(plain)
    for _ in range(8):  # memory is used again from the third on
        (inputs, labels), (expected, expected_labels) = next(both), next(expected_both)
        features = inputs.pop("text_features")
        assert inputs.keys() == expected.keys() and torch.equal(labels, expected_labels)
        for name in ("text_ids", "text_tokens", "latents"):
            assert torch.equal(inputs[name], expected[name])
        assert features.dtype == getattr(torch, stored)
        assert features.shape == (*inputs["text_ids"].shape, 64)
        for row, sample_id in enumerate(inputs["sample_id"]):
            own = made.read(number[sample_id], loader.features)
            assert torch.equal(features[row, 2 : 2 + len(own)], own)
            assert not features[row, :2].any() and not features[row, 2 + len(own) :].any()
            assert inputs["text_tokens"][row] == 2 + len(own)


def loader_of(made: Made, tmp_path, **changes):
    folder = Path(made.dataset.tar_paths[0]).parent
    settings = job(folder, made.encoder, tmp_path, **changes)
    return build_dataloader(
        1, 0, made.tokenizer, settings, lambda data: open_text_features(data, made.kind)
    )


def test_corrupt_features_and_other_tokens_are_refused_or_skipped(shards, gemma, tmp_path):
    made = Made(shards, gemma, cache_dtype="bfloat16")
    made.make()
    with pytest.MonkeyPatch.context() as patch:
        text_ids = made.tokenizer.text_ids
        patch.setattr(made.tokenizer, "text_ids", lambda text: text_ids(text)[1:])
        with pytest.raises(InputError, match="where its stored features are for"):
            next(iter(loader_of(made, tmp_path)))
    flip_last_byte(made.path(1))
    (*_, corrupt) = np.flatnonzero(made.dataset.shard == 1).tolist()

    def batches(**changes):
        iterator = iter(loader_of(made, tmp_path, **changes))
        return [next(iterator)[0] for _ in range(8)]

    with pytest.raises(CorruptSampleError, match="000001.safetensors"):
        batches()
    taken = batches(on_error="skip", max_corrupt_fraction=0.1)
    names = [name for inputs in taken for name in inputs["sample_id"]]
    assert made.dataset.sample_id(corrupt) not in names and len(set(names)) == 29
    assert sum(inputs["replaced"] for inputs in taken) > 0


def test_texts_that_are_too_long_to_be_encoded(shards, gemma, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store, "LONGEST_TEXT", 5)
    made = Made(shards, gemma)
    made.make()
    settings = job(shards, made.encoder, tmp_path)
    with pytest.raises(InputError, match="max_text_tokens = 192, but texts of more than 5 tokens"):
        stored_text_features(made.dataset, made.tokenizer, settings)
    settings.data.max_text_tokens = 5
    features = stored_text_features(made.dataset, made.tokenizer, settings)
    assert features.tokens.tolist() == [len(made.ids(sample)) for sample in range(SAMPLES)]
    [first_long, *_] = np.flatnonzero(features.tokens > 5)
    with pytest.raises(CorruptSampleError, match="too long"):
        made.read(int(first_long), features)


def test_texts_longer_than_the_encoders_positions_are_refused(monkeypatch, tmp_path):
    settings = JobConfig(encoder=Encoder(model="some/encoder"))
    settings.job.dump_folder = str(tmp_path)
    source = SimpleNamespace(max_tokens=191)
    monkeypatch.setattr(text_encoder, "find_source", lambda *_, **__: source)
    with pytest.raises(InputError, match="max_text_tokens = 192, but some/encoder .* 191 tokens"):
        build_frozen_encoder(settings, one_rank(), None, torch.device("cpu"))


def test_a_start_needs_the_features_and_no_weights(shards, gemma, tmp_path):
    model = Path(shutil.copytree(gemma, tmp_path / "tiny-gemma"))
    made = Made(shards, model)
    made.make()
    (model / "model.safetensors").unlink()
    loader = build_agreed_dataloader(1, 0, made.tokenizer, job(shards, made.encoder, tmp_path))
    assert loader.features.encoder_fingerprint == made.kind.encoder_fingerprint
    assert next(iter(loader))[0]["text_features"].any()
    made.path(1).unlink()
    sentence = "missing for 1 of 3 shards.*titan-tts prepare SOURCE OUTPUT --encode-text"
    with pytest.raises(InputError, match=sentence):
        build_agreed_dataloader(1, 0, made.tokenizer, job(shards, made.encoder, tmp_path))
