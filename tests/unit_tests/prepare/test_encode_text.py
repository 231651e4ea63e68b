"""Text features of a prepared output, made by workers."""

import errno
from pathlib import Path

import pytest

from tests.helpers.encoded_shards import SAMPLES, SHARDS, write_shards
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tests.helpers.sentences import refused
from titan_tts.prepare import encode_text
from torchtitan.models.dit_tts.config.job_config import Encoder

TARS = [f"{shard:06d}.tar" for shard in range(SHARDS)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return write_tiny_t5gemma2(tmp_path_factory.mktemp("encoders") / "tiny-gemma")


@pytest.fixture
def shards(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_shards(tmp_path / "train")


def encode(model: Path) -> tuple[int, int]:
    config = Encoder(model=str(model), dtype="float32")
    return encode_text.encode_texts(Path("train"), TARS, config, "cpu", "local")


def test_a_full_disk_is_one_sentence(shards, gemma, monkeypatch):
    def full(*args):  # as a disk; rights do not bind root
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(encode_text, "write_feature_file", full)
    refused(lambda: encode(gemma), "cannot be written (No space left); free space")


@pytest.mark.long
def test_each_text_is_encoded_once(shards, gemma):
    assert encode(gemma) == (SAMPLES, SAMPLES)
    assert encode(gemma) == (SAMPLES, 0)
