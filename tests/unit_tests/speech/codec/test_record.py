"""A run's codec must be the one that its data's latents came from."""

import json

import pytest

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.codec.record import (
    check_codec,
    check_kind,
    check_same_codec,
    recorded_codecs,
)


@pytest.fixture
def prepared(tmp_path):
    """A folder that prepare made with the embedded codec, as far as its record goes."""
    (tmp_path / "out" / "train").mkdir(parents=True)
    settings = {"codec": "mel_dct", "codec_fingerprint": build_codec("mel_dct").fingerprint}
    (tmp_path / "out" / "prepare.json").write_text(json.dumps({"settings": settings}))
    return tmp_path / "out"


def test_one_record_of_several_entries_is_one(prepared):
    [record] = recorded_codecs([str(prepared / "train"), str(prepared)])
    assert record.kind == "mel_dct"


def test_the_codec_of_the_data_passes_and_another_does_not(prepared):
    path = str(prepared / "train")
    check_kind("mel_dct", path)
    check_codec(build_codec("mel_dct"), path)
    with pytest.raises(InputError, match="are mel_dct's"):
        check_kind("facebook/dacvae-watermarked", path)
    record = json.loads((prepared / "prepare.json").read_text())
    record["settings"]["codec_fingerprint"] = "0" * 16
    (prepared / "prepare.json").write_text(json.dumps(record))
    # Also where it is the second of several.
    for data in (path, [str(prepared.parent / "nowhere"), path]):
        with pytest.raises(InputError, match="is not the one that .*prepare.json names"):
            check_codec(build_codec("mel_dct"), data)


@pytest.mark.parametrize(
    "folder, entry",
    [
        ("out", "train"),
        ("out", "train/*.tar"),
        ("out/train", "."),
        ("out/train", "000000.tar"),
        ("", "~/out/train/{000000..000001}.tar"),
    ],
)
def test_the_record_is_found_from_any_way_to_name_the_data(prepared, folder, entry, monkeypatch):
    monkeypatch.setenv("HOME", str(prepared.parent))
    monkeypatch.chdir(prepared.parent / folder)
    [record] = recorded_codecs(entry)
    assert record.path == str(prepared / "prepare.json")


@pytest.mark.parametrize(
    "entry", ["{out,other}/train", "*/train/*.tar", "**/*.tar", "{out,*}/train/0000{00,01}.tar"]
)
def test_braces_and_globs_name_folders_too(prepared, entry):
    root = prepared.parent
    (root / "other" / "train").mkdir(parents=True)
    record = json.loads((prepared / "prepare.json").read_text())
    record["settings"]["codec_fingerprint"] = "0" * 16
    (root / "other" / "prepare.json").write_text(json.dumps(record))
    for folder in ("out", "other"):
        for number in range(2):
            (root / folder / "train" / f"{number:06d}.tar").touch()
    found = {record.path for record in recorded_codecs(str(root / entry))}
    assert found == {str(root / folder / "prepare.json") for folder in ("out", "other")}
    with pytest.raises(InputError, match="other/prepare.json names"):
        check_codec(build_codec("mel_dct"), str(root / entry))
    for path in (str(root / entry), [str(prepared / "train"), str(root / "other" / "train")]):
        with pytest.raises(InputError, match="latents of two codecs: .*prepare.json.*0{16}"):
            check_kind("mel_dct", path)


def test_the_record_of_other_data_further_up_is_not_taken(prepared):
    (prepared / "other" / "train").mkdir(parents=True)
    for entry in ("other/train", "other/train/000000.tar"):
        assert recorded_codecs(str(prepared / entry)) == []


def test_the_nearest_record_is_taken_with_the_steps_before_the_codec(prepared):
    record = json.loads((prepared / "prepare.json").read_text())
    record["settings"]["audio"] = {"loudness": None, "max_silence": 0.5}
    (prepared / "train" / "prepare.json").write_text(json.dumps(record))
    assert [one.audio for one in recorded_codecs(str(prepared / "train" / "*.tar"))] == [
        {"loudness": None, "max_silence": 0.5}
    ]
    assert [one.audio for one in recorded_codecs(str(prepared))] == [{}]


def test_data_without_a_record_pass(tmp_path):
    (tmp_path / "prepare.json").write_text("{")
    for path in (str(tmp_path), ["s3://bucket/data/", "", str(tmp_path / "x")]):
        assert recorded_codecs(path) == []
        check_kind("mel_dct", path)


def test_held_out_data_are_of_the_same_codec(prepared, tmp_path):
    data, heldout = str(prepared / "train"), tmp_path / "other"
    heldout.mkdir()
    check_same_codec(data, data)
    check_same_codec(str(heldout), data)  # without a record nothing is known
    settings = {"codec": "mel_dct", "codec_fingerprint": "0" * 16}
    (heldout / "prepare.json").write_text(json.dumps({"settings": settings}))
    with pytest.raises(InputError, match="other/prepare.json names another codec .*0000"):
        check_same_codec(str(heldout), data)
    check_same_codec(str(heldout), str(tmp_path / "nowhere"))
