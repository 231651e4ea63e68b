"""Text features of a prepared output, made by workers."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.helpers.encoded_shards import SAMPLES, SHARDS, Made, write_shards
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from titan_tts.prepare import encode_text
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text import feature_builder

TARS = [f"{shard:06d}.tar" for shard in range(SHARDS)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return write_tiny_t5gemma2(tmp_path_factory.mktemp("encoders") / "tiny-gemma")


@pytest.fixture
def shards(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_shards(tmp_path / "train")


def encode(model: Path) -> dict[str, int]:
    config = Encoder(model=str(model), dtype="float32")
    return encode_text.encode_texts(Path("train"), TARS, config, "cpu", "local")


def test_workers_whose_features_are_not_found_are_noticed(shards, gemma, monkeypatch):
    def runner(function, jobs):
        assert [job[0] for job in jobs] == [str(shards / tar) for tar in TARS]
        return ({"texts": 10} for _ in jobs)

    engines = {("local", 1, ("cpu",)): nullcontext(runner)}
    monkeypatch.setattr(encode_text, "open_engine", lambda *a: engines[*a[:2], tuple(a[2])])
    monkeypatch.setattr(encode_text, "SETTLE_SECONDS", 0)
    with pytest.raises(InputError, match="missing for 3 of 3 shards.*workers write elsewhere"):
        encode(gemma)


@pytest.mark.long
def test_texts_that_are_too_long_are_counted(shards, gemma, monkeypatch):
    monkeypatch.setattr(feature_builder, "LONGEST_TEXT", 5)
    made = Made(shards, gemma)
    too_long = sum(len(made.ids(sample)) > 5 for sample in range(SAMPLES))
    assert 0 < too_long < SAMPLES
    expected = {"texts": SAMPLES, "made": SAMPLES, "too_long": too_long, "longest": 5}
    assert encode(gemma) == expected
    assert encode(gemma) == expected | {"made": 0}
