"""From recordings to archives: complete triplets, honest references, no work twice, clear errors."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

from torchtitan.models.dit_tts.codec import build_codec
from torchtitan.models.dit_tts.prepare.audio_corpus import read_audio_corpus
from torchtitan.models.dit_tts.prepare.build_archives import prepare_corpus

CORPUS = Path(__file__).parents[2] / "assets/spoken_digits/spoken_digits.tar"


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def recording(
    key: str, speaker: str, split: str, samples: int = 8000, rate: int = 16_000
) -> dict[str, bytes]:
    """The two members of a recording: a tone whose pitch depends on the key."""
    audio = io.BytesIO()
    tone = 0.1 * np.sin(np.arange(samples) * (0.02 + 0.001 * (sum(key.encode()) % 97)))
    soundfile.write(audio, tone, rate, format="FLAC")
    metadata = {"text": f"text of {key}", "speaker": speaker, "split": split, "language": "en"}
    return {f"{key}.flac": audio.getvalue(), f"{key}.json": json.dumps(metadata).encode()}


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Two speakers with four and three training utterances and one held out each; one who is alone."""
    members = {}
    for speaker, count in (("ann", 4), ("bob", 3)):
        for number in range(count):
            members |= recording(f"{speaker}-{number}", speaker, "train", 6000 + 700 * number)
        members |= recording(f"{speaker}-held", speaker, "heldout", 9000)
    members |= recording("cat-0", "cat", "train", 12_800)
    return write_tar(tmp_path / "corpus.tar", members)


def read_archive(folder: Path) -> dict[str, dict]:
    """{key: {"npy": latents, "ref.npy": reference, "json": metadata}} of all shards of a folder."""
    samples: dict[str, dict] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, kind = member.name.split(".", 1)
                data = tar.extractfile(member).read()
                value = json.loads(data) if kind == "json" else np.load(io.BytesIO(data))
                samples.setdefault(key, {})[kind] = value
    return samples


def contains(latents: np.ndarray, part: np.ndarray) -> bool:
    """Whether `part` is a run of frames of `latents`."""
    starts = range(len(latents) - len(part) + 1)
    return any(np.array_equal(latents[start : start + len(part)], part) for start in starts)


def test_embedded_corpus():
    utterances = list(read_audio_corpus(CORPUS))
    train = [one for one in utterances if one.split == "train"]
    assert (len(train), len(utterances) - len(train)) == (880, 48)
    assert {one.text for one in train}.isdisjoint(
        one.text for one in utterances if one.split == "heldout"
    )
    for voice in ("slt", "rms", "awb", "kal16"):
        texts = [one.text.split() for one in utterances if one.speaker == voice]
        assert len(texts) == 232 and len({tuple(text) for text in texts}) == 232
        assert len({pair for text in texts for pair in zip(text, text[1:])}) > 90
    assert all(one.waveform.abs().max() < 1 and one.sample_rate == 16_000 for one in utterances)
    assert all(one.metadata["license"] == "LicenseRef-CMU-Flite" for one in utterances)
    assert CORPUS.stat().st_size < 5.5e6


def test_triplets_and_references(corpus, tmp_path):
    codec = build_codec("mel_dct")
    summary = prepare_corpus(corpus, tmp_path / "out", codec, samples_per_shard=3)
    assert summary["train"]["samples"] == 8 and summary["train"]["shards"] == 3
    assert summary["heldout"]["samples"] == 2 and summary["speakers"] == 3
    assert summary["own_crop_references"] == 1 and summary["reused"] is False
    train, heldout = read_archive(tmp_path / "out/train"), read_archive(tmp_path / "out/heldout")
    recordings = {one.key: one for one in read_audio_corpus(corpus)}
    assert set(train) | set(heldout) == set(recordings)
    for key, sample in (train | heldout).items():
        latents, reference, metadata = sample["npy"], sample["ref.npy"], sample["json"]
        waveform = recordings[key].waveform
        assert latents.dtype == reference.dtype == np.float16
        np.testing.assert_array_equal(latents, codec.encode(waveform).half().numpy())
        assert metadata["target_duration"] == len(waveform) / 16_000
        assert metadata["text"] == f"text of {key}" and metadata["language"] == "en"
        source = metadata["reference_key"]
        assert (
            train[source]["json"]["speaker"] == metadata["speaker"]
        )  # never from the held-out part
        assert contains(train[source]["npy"], reference)
        if metadata["speaker"] == "cat":
            assert source == key and len(reference) == 10  # half of its own 20 frames
        else:
            assert source != key


def test_long_references_are_cropped(tmp_path):
    members = recording("a", "ann", "train", 16_000 * 20) | recording("b", "ann", "train", 640)
    prepare_corpus(write_tar(tmp_path / "c.tar", members), tmp_path / "out", build_codec("mel_dct"))
    samples = read_archive(tmp_path / "out/train")
    assert samples["b"]["ref.npy"].shape == (384, 128) and samples["a"]["ref.npy"].shape == (1, 128)


def test_second_run_does_nothing_and_a_change_rebuilds(corpus, tmp_path):
    out, codec = tmp_path / "out", build_codec("mel_dct")
    first = prepare_corpus(corpus, out, codec)
    shard = out / "train/shard-000000.tar"
    content, inode = shard.read_bytes(), shard.stat().st_ino
    again = prepare_corpus(corpus, out, codec)
    assert again == first | {"reused": True} and shard.stat().st_ino == inode

    shard.write_bytes(content[:1000])  # damaged: built again, to the same bytes
    assert prepare_corpus(corpus, out, codec)["reused"] is False
    assert shard.read_bytes() == content
    assert prepare_corpus(corpus, out, codec, seed=1)["reused"] is False
    assert shard.read_bytes() != content
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar", "out"]  # nothing is left beside


def test_a_failed_run_leaves_the_old_folder(corpus, tmp_path):
    out, codec = tmp_path / "out", build_codec("mel_dct")
    prepare_corpus(corpus, out, codec)
    before = sorted(out.rglob("*"))
    with tarfile.open(corpus, "a") as tar:
        tar.addfile(tarfile.TarInfo("late.flac"))
    with pytest.raises(ValueError, match="late, which lacks KEY.json"):
        prepare_corpus(corpus, out, codec)
    assert sorted(out.rglob("*")) == before
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar", "out"]


def test_a_foreign_folder_is_not_replaced(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("ten years of work")
    with pytest.raises(ValueError, match="not replaced"):
        prepare_corpus(corpus, tmp_path / "out", build_codec("mel_dct"))
    assert (tmp_path / "out/thesis.tex").exists()


def broken_corpora() -> dict[str, tuple[dict[str, bytes], str]]:
    good, stereo = recording("a", "ann", "train"), io.BytesIO()
    soundfile.write(stereo, np.zeros((100, 2)), 16_000, format="FLAC")
    audio, other_rate = good["a.flac"], recording("a", "ann", "train", rate=24_000)

    def with_json(value: bytes) -> dict[str, bytes]:
        return {"a.flac": audio, "a.json": value}

    return {
        "no text": (with_json(b'{"speaker": "ann"}'), '"text" = None'),
        "speaker is a number": (with_json(b'{"text": "x", "speaker": 3}'), '"speaker" = 3'),
        "split": (with_json(b'{"text": "x", "speaker": "a", "split": "dev"}'), "\"split\" = 'dev'"),
        "not JSON": (with_json(b"{"), "a.json is not JSON"),
        "JSON list": (with_json(b"[]"), '"text" = None'),
        "no audio": ({"a.json": good["a.json"]}, "lacks an audio member"),
        "not audio": (
            {"a.flac": b"hello", "a.json": good["a.json"]},
            "audio of a cannot be decoded",
        ),
        "stereo": ({"a.flac": stereo.getvalue(), "a.json": good["a.json"]}, "2 channels"),
        "two audios": (good | {"a.wav": b""}, "more than one audio member"),
        "other file": (good | {"a.mp3": b""}, "neither .json nor audio"),
        "empty": ({}, "holds no recording|not a readable tar"),
        "sample rate": (other_rate, "24000 Hz"),
        "held out only": (recording("a", "ann", "heldout"), "training needs at least one"),
    }


@pytest.mark.parametrize("name", broken_corpora())
def test_bad_corpora(name, tmp_path):
    members, message = broken_corpora()[name]
    path = write_tar(tmp_path / "c.tar", members)
    with pytest.raises(ValueError, match=message):
        prepare_corpus(path, tmp_path / "out", build_codec("mel_dct"))
    assert sorted(os.listdir(tmp_path)) == ["c.tar"]


def test_damaged_tars(corpus, tmp_path):
    content = corpus.read_bytes()
    with tarfile.open(corpus) as tar:
        fifth = tar.getmembers()[4].offset
    flipped = bytearray(content)
    flipped[fifth + 10] ^= 1  # in a header: Python's tarfile takes it for the end of the archive
    for damaged in (
        content[: fifth + 700],
        content[:fifth],
        bytes(flipped),
        b"not a tar" * 200,
        b"",
    ):
        path = tmp_path / "damaged.tar"
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged.tar"):
            list(read_audio_corpus(path))
    with pytest.raises(ValueError, match="no such corpus"):
        list(read_audio_corpus(tmp_path / "missing.tar"))
