"""Text features in training: made at the first start by all ranks, then read by the loader."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.encoded_shards import (
    SAMPLES,
    SHARDS,
    Made,
    flip_last_byte,
    write_shards,
)
from tests.helpers.loaders import config
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tools.harness.forked import run_ranks
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra import feature_cache, text_encoder
from torchtitan.models.dit_tts.infra.collectives import run_on_all_ranks
from torchtitan.models.dit_tts.infra.feature_cache import ready_text_features, split_missing
from torchtitan.models.dit_tts.text import feature_builder
from torchtitan.models.dit_tts.text.feature_store import open_text_features
from torchtitan.models.dit_tts.text.hf_tokenizer import (
    SubwordTokenizer,
    load_subword_tokenizer,
)
from torchtitan.models.dit_tts.train_spec import build_agreed_dataloader


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
        for name in ("text_ids", "text_mask", "latents"):
            assert torch.equal(inputs[name], expected[name])
        assert features.dtype == getattr(torch, stored)
        assert features.shape == (*inputs["text_ids"].shape, 64)
        for row, sample_id in enumerate(inputs["sample_id"]):
            own = made.read(number[sample_id], loader.features)
            assert torch.equal(features[row, 2 : 2 + len(own)], own)
            assert not features[row, :2].any() and not features[row, 2 + len(own) :].any()
            assert inputs["text_mask"][row].sum() == 2 + len(own)


def test_the_loader_skips_corrupt_features_by_the_rules(shards, gemma, tmp_path):
    made = Made(shards, gemma, cache_dtype="bfloat16")
    made.make()
    flip_last_byte(made.path(1))
    (*_, corrupt) = np.flatnonzero(made.dataset.shard == 1).tolist()

    def batches(**changes):
        settings = job(shards, made.encoder, tmp_path, **changes)
        loader = build_dataloader(
            1, 0, made.tokenizer, settings, lambda data: open_text_features(data, made.kind)
        )
        iterator = iter(loader)
        return [next(iterator)[0] for _ in range(8)]

    with pytest.raises(CorruptSampleError, match="000001.safetensors"):
        batches()
    taken = batches(on_error="skip", max_corrupt_fraction=0.1)
    names = [name for inputs in taken for name in inputs["sample_id"]]
    assert made.dataset.sample_id(corrupt) not in names and len(set(names)) == 29
    assert sum(inputs["replaced"] for inputs in taken) > 0


def test_features_of_another_number_of_tokens_are_refused(shards, gemma, tmp_path):
    made = Made(shards, gemma)
    made.make()
    tokenizer = load_subword_tokenizer(str(gemma))
    loader = build_dataloader(
        1,
        0,
        tokenizer,
        job(shards, made.encoder, tmp_path),
        lambda data: open_text_features(data, made.kind),
    )
    tokenizer.text_ids = lambda text: made.tokenizer.text_ids(text)[1:]
    with pytest.raises(InputError, match="where its stored features are for"):
        next(iter(loader))


def test_texts_that_are_too_long_to_be_encoded(shards, gemma, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_builder, "LONGEST_TEXT", 5)
    made = Made(shards, gemma)
    settings = job(shards, made.encoder, tmp_path)
    with pytest.raises(InputError, match="max_text_tokens = 192, but texts of more than 5 tokens"):
        ready_text_features(made.dataset, made.tokenizer, settings)
    settings.data.max_text_tokens = 5
    features = ready_text_features(made.dataset, made.tokenizer, settings)
    assert features.tokens.tolist() == [len(made.ids(sample)) for sample in range(SAMPLES)]
    for sample, tokens in enumerate(features.tokens.tolist()):
        if tokens > 5:
            with pytest.raises(CorruptSampleError, match="too long"):
                made.read(sample, features)
        else:
            made.read(sample, features)
    assert 0 < (features.tokens > 5).sum() < 30


def test_the_second_start_needs_no_encoder(shards, model, tmp_path, monkeypatch):
    made = Made(shards, model)
    settings = job(shards, made.encoder, tmp_path)
    first = build_agreed_dataloader(1, 0, made.tokenizer, settings)
    (model / "model.safetensors").unlink()
    monkeypatch.setattr(feature_cache, "load_text_encoder", None)
    second = build_agreed_dataloader(1, 0, made.tokenizer, settings)
    assert second.features.encoder_fingerprint == first.features.encoder_fingerprint
    one, two = next(iter(first))[0], next(iter(second))[0]
    assert torch.equal(one["text_features"], two["text_features"])
    monkeypatch.undo()
    made.path(1).unlink()
    lacking = (
        "missing for 1 of 3 shards, the first is .*000001.tar, and cannot be made here: .*weights"
    )
    with pytest.raises(InputError, match=lacking):
        build_agreed_dataloader(1, 0, made.tokenizer, settings)


def test_weights_that_are_downloaded_when_files_are_missing(shards, model, tmp_path, monkeypatch):
    made = Made(shards, model)
    made.make([0])
    before = made.path(0).stat().st_mtime_ns
    weights = (model / "model.safetensors").rename(tmp_path / "weights")

    def download(name):
        assert name == str(model)
        shutil.copy(weights, model / "model.safetensors")

    monkeypatch.setattr(text_encoder, "fetch_weights", download)
    settings = job(shards, made.encoder, tmp_path)
    features = ready_text_features(made.dataset, made.tokenizer, settings)
    assert features.kind == made.kind and len(features.tokens) == SAMPLES
    assert made.path(0).stat().st_mtime_ns == before


def test_a_rank_with_other_weights_makes_nothing(shards, gemma, tmp_path):
    made = Made(shards, gemma)
    kind = replace(made.kind, encoder_fingerprint="0123456789abcdef")
    settings = job(shards, made.encoder, tmp_path)
    maker = feature_cache._Maker(made.dataset, kind, made.tokenizer, settings, made.module.source)
    with pytest.raises(InputError, match="are others than rank 0's .0123456789abcdef"):
        maker.make([0], progress=False)
    assert not (shards / "text_features").exists()


def test_every_missing_shard_is_made_once_by_who_misses_it():
    for seed in range(20):
        generator = np.random.default_rng(seed)
        counts = generator.integers(0, 40, 5)
        missing = [sorted(set(generator.integers(0, 50, count).tolist())) for count in counts]
        parts = split_missing(missing)
        assert sorted(sum(parts, [])) == sorted(set().union(*missing))
        assert all(set(part) <= set(lacks) for part, lacks in zip(parts, missing))
    assert sorted(map(len, split_missing([list(range(10))] * 3))) == [3, 3, 4]


def two_ranks(rank: int, shared: str, own: list[str], model: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    feature_cache.SETTLE_SECONDS = 0
    made_by_me = []
    make = feature_cache.make_text_features

    def noted(dataset, shards, *args, **options):
        made_by_me.extend(shards)
        make(dataset, shards, *args, **options)

    def watched(action, what, group=None):
        # Encoding takes longer than the default group waits.
        assert group is not None
        return run_on_all_ranks(action, what, group)

    feature_cache.make_text_features, feature_cache.run_on_all_ranks = noted, watched
    encoder = Encoder(model=model, dtype="float32", cache_features=True)
    tokenizer = load_subword_tokenizer(model)
    try:
        for folder, rounds in ((shared, 1), (own[rank], 2)):
            settings = job(folder, encoder, Path(rendezvous).parent, local=4)
            loader = build_agreed_dataloader(2, rank, tokenizer, settings)
            assert next(iter(loader))[0]["text_features"].any()
            everyone = sum(run_on_all_ranks(lambda _: list(made_by_me), "count"), [])
            # On disks of their own each rank comes to make all shards, none twice.
            assert sorted(everyone) == sorted(list(range(SHARDS)) * rounds)
            made_by_me.clear()
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_two_ranks_make_them_together(shards, gemma, tmp_path):
    own = [str(shutil.copytree(shards, tmp_path / name)) for name in ("one", "two")]
    arguments = (str(shards), own, str(gemma), str(tmp_path / "rendezvous"))
    run_ranks(two_ranks, 2, *arguments)
