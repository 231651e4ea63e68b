"""A run's codec must be the one that its data's latents came from."""

import json

import pytest

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.codec.record import (
    check_codec,
    check_kind,
    check_same_codec,
    recorded_codecs,
)


def write_record(folder, fingerprint="0" * 16, **settings):
    """The record of a folder that prepare made with the embedded codec."""
    (folder / "train").mkdir(parents=True, exist_ok=True)
    settings = {"codec": "mel_dct", "codec_fingerprint": fingerprint} | settings
    (folder / "prepare.json").write_text(json.dumps({"settings": settings}))
    for number in range(2):
        (folder / "train" / f"{number:06d}.tar").touch()
    return folder


@pytest.fixture
def prepared(tmp_path):
    return write_record(tmp_path / "out", build_codec("mel_dct").fingerprint)


def test_the_codec_of_the_data_passes_and_another_does_not(prepared, tmp_path):
    path, codec = str(prepared / "train"), build_codec("mel_dct")
    check_kind("mel_dct", path)
    check_codec(codec, path)
    refused(lambda: check_kind("facebook/dacvae-watermarked", path), "are mel_dct's")
    other = str(write_record(tmp_path / "other") / "train")
    for data in (other, [str(tmp_path / "nowhere"), other], [path, other]):
        refused(lambda: check_codec(codec, data), "is not the one that", "other/prepare.json (")
    # Held-out data and training data; without a record nothing is known.
    for heldout, data in ((path, path), (str(tmp_path / "x"), path), (other, str(tmp_path / "x"))):
        check_same_codec(heldout, data)
    refused(lambda: check_same_codec(other, path), "other/prepare.json (", "0000) names another")


@pytest.mark.parametrize(
    "folder, entry, names",
    [
        ("out", "train", ["out"]),
        ("out/train", "000000.tar", ["out"]),
        ("", "~/out/train/{000000..000001}.tar", ["out"]),
        ("", "**/*.tar", ["other", "out"]),
    ],
)
def test_the_record_is_found_from_any_way_to_name_the_data(
    prepared, tmp_path, folder, entry, names, monkeypatch
):
    write_record(tmp_path / "other", audio={"loudness": None})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / folder)
    found = recorded_codecs([entry, str(prepared)])  # of several entries it is one
    assert sorted(one.path for one in found) == [
        f"{tmp_path}/{name}/prepare.json" for name in names
    ]
    assert {one.path: one.audio for one in found}[f"{prepared}/prepare.json"] == {}
    if len(names) == 2:
        for path in (entry, [str(prepared / "train"), str(tmp_path / "other/train")]):
            words = ("latents of two codecs", "prepare.json", "0" * 16)
            refused(lambda: check_kind("mel_dct", path), *words)


def test_the_nearest_record_counts_and_none_passes(prepared, tmp_path):
    audio = {"loudness": None, "max_silence": 0.5}
    write_record(prepared / "train", audio=audio)
    assert [one.audio for one in recorded_codecs(str(prepared / "train" / "*.tar"))] == [audio]
    (prepared / "further" / "down").mkdir(parents=True)
    (tmp_path / "prepare.json").write_text("{}")  # another program's
    below = [str(prepared / "further/down"), str(prepared / "further/down/000000.tar")]
    for path in (*below, str(tmp_path), ["s3://bucket/data/", "", str(tmp_path / "x")]):
        assert recorded_codecs(path) == []
        check_kind("mel_dct", path)
    (tmp_path / "prepare.json").write_text("{")
    refused(
        lambda: check_kind("mel_dct", str(tmp_path)), "prepare.json: is damaged", "copy it again"
    )
