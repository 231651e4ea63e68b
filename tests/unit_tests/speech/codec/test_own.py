"""A codec that a user's function makes."""

import pytest
import torch

from tests.helpers.sentences import refused
from titan_tts.export.exporter import about_codec
from torchtitan.models.dit_tts.speech.codec import build_codec, codec_kind
from torchtitan.models.dit_tts.speech.codec.interface import OWN

NAME = "tests.helpers.small_codec:SmallCodec:4"


def test_it_is_called_by_its_name(tmp_path, monkeypatch):
    codec = build_codec(NAME)
    assert (codec.name, codec.latent_channels, codec.frames_per_second) == (NAME, 4, 25.0)
    assert codec.encode(torch.rand(1000) / 9).shape == (2, 4)
    assert codec_kind(NAME) == codec_kind(OWN) == codec_kind("") == OWN
    about = about_codec(codec)  # in a folder, which names no function
    assert (about["kind"], about["name"], about["fingerprint"]) == (OWN, "", "small-4")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    assert codec_kind("a:b") == "dac_vae"  # a path of that form is a path


@pytest.mark.parametrize(
    "name, words",
    [
        ("", "give --codec package.module:factory"),
        ("tests.helpers.small_codec:Nobody", "cannot be imported"),
        ("tests.helpers.small_codec:SmallCodec:many", "failed (ValueError"),
        ("collections:Counter", "lacks sample_rate, hop_length"),
    ],
)
def test_what_is_none_is_said(name, words):
    refused(lambda: build_codec(name), words)
