"""From recordings to shards: complete triplets, honest references, every reason counted."""

import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from tests.helpers import speech_corpora as corpora
from tests.helpers.speech_corpora import AS_IS, prepare, tone
from tests.helpers.tars import write_tar
from titan_tts.prepare import audio_reader, encode, pipeline
from titan_tts.prepare.processing import REASONS
from titan_tts.prepare.settings import AudioSettings
from tools.harness.http_server import FolderServer
from torchtitan.models.dit_tts.data import members as members_table
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.members import ArrayMember
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.codec.mel_dct import STATISTICS_FILE

# Small chunks and shards: several of each.
SMALL = {"samples_per_shard": 3, "chunk_items": 4, "audio": AS_IS}
SKIP = {"on_error": "skip", "max_corrupt_fraction": 0.5}


def recording(
    key: str, speaker: str, split: str, samples: int = 8000, **more: object
) -> dict[str, bytes]:
    """The two members of a recording: a tone whose pitch depends on the key."""
    sound = tone(samples / 16_000, hertz=60 + 3 * sum(key.encode()))
    audio = corpora.audio_bytes(sound, 16_000, "FLAC")
    metadata = {"text": f"text of {key}", "speaker": speaker, "split": split, "language": "en"}
    return {f"{key}.flac": audio, f"{key}.json": json.dumps(metadata | more).encode()}


def write_corpus(path: Path, members: dict[str, bytes]) -> Path:
    write_tar(path, members.items())
    return path


@pytest.fixture
def members() -> dict[str, bytes]:
    """Two speakers with four and three training utterances and one held out, ann two; cat and dan
    are alone."""
    members = recording("ann-held2", "ann", "heldout", 9000)
    members |= recording("dan-held", "dan", "heldout", 7000)
    for speaker, count in (("ann", 4), ("bob", 3)):
        for number in range(count):
            # All but the first of ten frames or a little less: encoded in one batch.
            members |= recording(f"{speaker}-{number}", speaker, "train", 6400 - 50 * number)
        members |= recording(f"{speaker}-held", speaker, "heldout", 9000)
    return members | recording("cat-0", "cat", "train", 12_800)


@pytest.fixture
def corpus(members, tmp_path) -> Path:
    return write_corpus(tmp_path / "corpus.tar", members)


def read_shards(folder: Path) -> dict[str, dict]:
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


def test_references_of_two_speakers_are_joined(tmp_path):
    """In the order of the list, each cut to an equal part of the limit; one that is named alone has all of it. Of their
    0.2 s of silence as much is kept as of a sample's."""
    codec, sounds = build_codec("mel_dct"), {}
    for name, seconds in (("long", 0.8), ("short", 0.12), ("said", 0.4)):
        silent = np.concatenate([np.zeros(3200, "f4"), tone(seconds, hertz=100 + 1000 * seconds)])
        sounds[name] = silent[3200 - 640 :]
        audio = corpora.audio_bytes(silent, 16_000, "WAV", "FLOAT")
        (tmp_path / f"{name}.wav").write_bytes(audio)
    named = {"a": ["long.wav", "short.wav"], "b": ["short.wav", "long.wav"], "c": "long.wav"}
    rows = [
        {"audio": "said.wav", "key": key, "text": "a", "speaker": "x", "reference": paths}
        for key, paths in named.items()
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # The filter is not for references.
    filtered = AudioSettings(loudness=None, max_silence=0.04, min_seconds=0.3)
    prepare(tmp_path / "m.jsonl", tmp_path / "out", audio=filtered, max_reference_frames=10)
    long, short = (codec.encode(torch.from_numpy(sounds[name])) for name in ("long", "short"))
    found = read_shards(tmp_path / "out/train")
    # Frames of a cut recording differ near the cut, as the codec hears nothing behind it.
    for key, parts in {"a": (long[:5], short), "b": (short, long[:5]), "c": (long[:10],)}.items():
        reference, metadata = found[key]["ref.npy"], found[key]["json"]
        lengths = [len(part) for part in parts]
        assert len(reference) == sum(lengths) and "reference_key" not in metadata
        assert metadata.get("reference_parts", lengths) == lengths
        assert ("reference_parts" in metadata) == (key != "c")
        pieces = np.split(reference.astype(np.float32), np.cumsum(lengths)[:-1])
        for piece, part in zip(pieces, parts, strict=True):
            np.testing.assert_allclose(piece[:3], part.numpy()[:3], atol=2e-2)
    with pytest.raises(InputError, match="--references 0, but the reference of 'a' joins"):
        prepare(tmp_path / "m.jsonl", tmp_path / "none", references=0)
    (tmp_path / "short.wav").write_bytes(corpora.audio_bytes(np.zeros(8000), 16_000, "WAV"))
    silent = "a: a recording of its reference is quieter than -70 LUFS"
    with pytest.raises(InputError, match=silent):
        prepare(tmp_path / "m.jsonl", tmp_path / "other")


def test_triplets_and_references(corpus, tmp_path):
    own, shipped = tmp_path / STATISTICS_FILE.name, json.loads(STATISTICS_FILE.read_text())
    own.write_text(json.dumps(shipped | {"mean": [each + 1 for each in shipped["mean"]]}))
    codec = build_codec(str(own))
    options = SMALL | {"codec": str(own)}
    record = prepare(corpus, tmp_path / "out", **options | {"chunk_items": 5})
    summary, shards = record["summary"], record["shards"]
    assert summary["speakers"] == 4 and record["reused"] is False
    train = read_shards(tmp_path / "out/train")
    heldout = read_shards(tmp_path / "out/heldout")
    recordings = {one.key: one for one in corpora.read_corpus(corpus)}
    assert list(train) + list(heldout) == sorted(recordings, key=lambda key: "held" in key)
    for key, sample in (train | heldout).items():
        latents, reference, metadata = sample["npy"], sample["ref.npy"], sample["json"]
        waveform = torch.from_numpy(recordings[key].samples)
        assert latents.dtype == reference.dtype == np.float16
        np.testing.assert_allclose(latents, codec.encode(waveform).numpy(), atol=2e-2)
        assert metadata["target_duration"] == len(waveform) / 16_000
        assert metadata["text"] == f"text of {key}" and metadata["language"] == "en"
        if key in ("cat-0", "dan-held"):
            assert reference.shape == (0, 128) and not {"reference_key"} & metadata.keys()
            continue
        source = metadata["reference_key"]
        # ann has another held-out utterance, bob has not.
        others = heldout if key in ("ann-held", "ann-held2") else train
        assert source != key and others[source]["json"]["speaker"] == metadata["speaker"]
        np.testing.assert_array_equal(others[source]["npy"], reference)
    frames = [len(sample["npy"]) for sample in train.values()]
    expected = {"samples": 8, "frames": sum(frames), "shards": 3, "without_reference": 1}
    assert summary["train"] == expected | {"hours": round(sum(frames) / 25 / 3600, 4)}
    assert summary["heldout"]["without_reference"] == 1
    assert [shard["samples"] for shard in shards.values()] == [3, 3, 2, 3, 1]
    assert list(shards)[2:4] == ["train/shard-000002.tar", "heldout/shard-000000.tar"]
    for number, shard in enumerate(list(shards.values())[:3]):
        assert shard["frames"] == sum(frames[3 * number :][:3])
    assert [shard["without_reference"] for shard in shards.values()] == [0, 0, 1, 1, 0]
    for name, shard in shards.items():
        content = (tmp_path / "out" / name).read_bytes()
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
        assert shard["bytes"] == len(content) and (tmp_path / "out" / f"{name}.idx").exists()
    assert "no other recording: 1 (12.5%)" in "\n".join(pipeline.lines(summary))
    none = prepare(corpus, tmp_path / "none", **options, references=0)["summary"]["train"]
    assert (none["without_reference"], none["frames"]) == (8, sum(frames))
    for key, sample in read_shards(tmp_path / "none/train").items():
        assert sample["ref.npy"].shape == (0, 128) and "reference_key" not in sample["json"]
        np.testing.assert_array_equal(sample["npy"], train[key]["npy"])


def test_another_array_comes_from_the_recording_to_the_shard(corpus, tmp_path, monkeypatch):
    """A line in the table of members, and its values where the triplet is made."""
    level = ArrayMember("level", "level.npy", length="frames", entry="level", width=1)
    monkeypatch.setattr(members_table, "ARRAYS", (*members_table.ARRAYS, level))
    triplet = encode.Triplet

    def with_level(key, latents, *others):
        return triplet(key, latents, *others, {"level": latents[:, :1] + 1})

    monkeypatch.setattr(encode, "Triplet", with_level)
    prepare(corpus, tmp_path / "out", **SMALL)
    for sample in read_shards(tmp_path / "out/train").values():
        np.testing.assert_allclose(sample["level.npy"], sample["npy"][:, :1] + 1, atol=1e-2)


def write_table(path: Path, rows: list[dict], group: int = 10) -> None:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)


def test_latents_that_tables_hold(tmp_path):
    """The source's duration is kept where it fits the frames, and its reference. One table has two small
    row groups, the other is a stream of Arrow with a batch of more rows than are read at once."""
    durations = (0.41, 9.0, None)
    values = np.arange(41 * 10 * 128).reshape(41, 10, 128) % 1009
    rows = []
    for number, own in enumerate(values):
        row = {"id": f"k{number}", "text": f"text {number}", "speaker": "s"}
        row |= {"latents": own.tolist(), "reference": (own[5:9] + 100).tolist()}
        rows.append(row | {"target_duration": durations[number % 3]})
    long = rows[-1] | {"id": "long", "latents": (rows[-1]["latents"] * 2)[:11]}
    write_table(tmp_path / "source/a.parquet", rows[:20], 10)
    table = pyarrow.Table.from_pylist([*rows[20:], long])  # one batch, flat lists
    for name in ("latents", "reference"):
        flat = [np.ravel(each).tolist() for each in table[name].to_pylist()]
        table = table.set_column(table.schema.get_field_index(name), name, [flat])
    with pyarrow.ipc.new_stream(tmp_path / "source/b.arrow", table.schema) as writer:
        writer.write_table(table)
    ten = AudioSettings(min_seconds=0.4, max_seconds=0.4)
    record = prepare(tmp_path / "source", tmp_path / "out", max_reference_frames=3, audio=ten)
    assert record["summary"]["dropped"] == {"too_long": 1}
    dataset = open_dataset(str(tmp_path / "out/train"), 128)
    assert len(dataset) == len(rows)
    for number, own in enumerate(values):
        loaded = dataset.load(number)
        assert loaded.metadata["text"] == f"text {number}"
        np.testing.assert_array_equal(loaded.latents, own)
        np.testing.assert_array_equal(loaded.reference, own[5:8] + 100)
        assert loaded.metadata["target_duration"] == (0.41, 0.4, 0.4)[number % 3]
        assert "reference_key" not in loaded.metadata


def test_a_tables_reference_that_is_a_part_of_its_latents_is_replaced(tmp_path):
    values = np.random.default_rng(0).standard_normal((3, 30, 128))
    # Of its own latents, of another's, of its own and without another utterance, of another's.
    samples = (
        ("s", values[0], values[0][9:21]),
        ("s", values[1], values[1][:14]),
        ("t", values[0], values[0][3:9]),
        ("s", values[2], values[1][:14]),
    )
    rows = [
        {"id": f"k{n}", "text": "x", "speaker": speaker, "reference_key": "source's"}
        | {"reference_keys": ["source's"]}
        | {"latents": own.tolist(), "reference": reference.tolist()}
        for n, (speaker, own, reference) in enumerate(samples)
    ]
    write_table(tmp_path / "t.parquet", rows)
    summary = prepare(tmp_path / "t.parquet", tmp_path / "out")["summary"]
    assert summary["train"]["without_reference"] == 1
    train = read_shards(tmp_path / "out/train")
    found = {key: one["json"].get("reference_key") for key, one in train.items()}
    assert found["k0"] in ("k1", "k3") and found["k1"] in ("k0", "k3")
    assert (found["k2"], found["k3"]) == (None, "source's")
    assert "reference_keys" not in train["k0"]["json"].keys() | train["k2"]["json"].keys()
    np.testing.assert_array_equal(train["k3"]["ref.npy"], values[1][:14].astype(np.float16))


def test_every_reason_is_counted(tmp_path, monkeypatch):
    def of(samples: np.ndarray) -> bytes:
        return corpora.audio_bytes(samples, 16_000, "FLAC")

    members = (
        recording("ok-0", "s", "train", 16_000)
        | recording("ok-1", "s", "train", 17_000)
        | recording("clipped", "s", "train")
        | {"clipped.flac": of(np.sign(np.sin(np.arange(16_000) / 20)))}
        | recording("silent", "s", "train")
        | {"silent.flac": of(np.zeros(16_000))}
        | recording("too_short", "s", "train", 3000)
        | recording("too_long", "s", "train", 64_000)
        | recording("chars_per_second_low", "s", "train", 16_000, text="a")
        | recording("chars_per_second_high", "s", "train", 16_000, text="a" * 99)
        | recording("empty_text", "s", "train", 16_000, text=" ")
        | recording("not_wanted", "t", "train", 16_000)
        | recording("undecodable", "s", "train")
        | {"undecodable.flac": b"fLaC" + bytes(200)}
    )
    listed = {"no_text.flac": members["ok-0.flac"], "no_text.json": b'{"speaker": "s"}'}
    source = write_corpus(tmp_path / "c.tar", members)
    filters = AudioSettings(None, None, 0.5, 2, 2, 40, 0.01)
    settings = SMALL | {"audio": filters, "where": "speaker=s"}
    out = tmp_path / "out"
    one = "c.tar: undecodable: the audio cannot.*; .* --on-error skip$"
    with pytest.raises(InputError, match=one):
        prepare(source, out, **settings)
    # What cannot be used is one fraction, seen in the list or when it is decoded.
    write_corpus(source, members | listed)
    settings |= {"on_error": "skip"}
    few = "2 of 10 recordings are corrupt.*0.19 allows .give 0.21 .*; the last is undecodable: the audio"
    with pytest.raises(InputError, match=few):
        prepare(source, tmp_path / "few", **settings, max_corrupt_fraction=0.19)
    summary = prepare(source, tmp_path / "all", **settings, max_corrupt_fraction=0.2)["summary"]
    assert summary["dropped"] == dict.fromkeys(sorted(REASONS), 1) | {"undecodable": 2}
    assert summary["train"]["samples"] == 2
    assert [key for key, _ in summary["problems"]] == ["no_text", "undecodable"]
    assert "  too_long: 1, 0.1 minutes (above --max-seconds): too_long" in pipeline.lines(summary)
    # So is one that is too long to be read.
    monkeypatch.setattr(encode, "MAX_SECONDS", 0.0)
    members |= recording("too_long", "s", "train", 200_000)
    write_corpus(source, members | listed)
    long = prepare(source, tmp_path / "long", **settings, max_corrupt_fraction=0.2)["summary"]
    assert long["dropped"] == summary["dropped"]
    assert long["dropped_seconds"]["too_long"] == 12  # what was read of it
    alone = write_corpus(tmp_path / "l.tar", recording("too_long", "s", "train", 16_000))
    with pytest.raises(InputError, match="too_long: the audio has more than the 0 s of 1 channel"):
        prepare(alone, tmp_path / "any", **SMALL)
    settings |= {"audio": replace(filters, min_seconds=9, max_seconds=10)}
    with pytest.raises(InputError, match="no recording is left for train.*'too_short'"):
        prepare(source, tmp_path / "none", **settings, max_corrupt_fraction=0.2)


def test_processing_is_noted_per_sample(tmp_path):
    """Stereo at another rate, the right channel at half the level; a second of silence is cut to a quarter."""
    samples = np.concatenate([np.zeros(16_000, np.float32), corpora.tone(1, 0.02)])
    quiet = corpora.Speech("a", "x", "s", "train", samples)
    peak = np.where(np.arange(32_000) == 24_000, np.float32(0.9), samples)
    loud = np.where(np.arange(32_000) < 3200, np.float32(1.5), samples)
    others = [replace(quiet, key="b", samples=peak), replace(quiet, key="c", samples=loud)]
    prepare(corpora.write_manifest(tmp_path / "m", [quiet, *others]), tmp_path / "out")
    first, second, third = read_shards(tmp_path / "out/train").values()
    clipped = [each["json"].get("clipped") for each in (first, second, third)]
    assert clipped == [None, None, pytest.approx(0.1 / 2, abs=0.001)]  # of both channels
    # Nine blocks of 0.4 s, each 0.1 s: the tone fills 0.15, 0.25 and 0.35 s of the first three, and six others.
    gain = -16 + 36.99 + 2.5 - 10 * np.log10((6 + 0.75 / 0.4) / 9)
    assert first["json"]["gain_db"] == pytest.approx(gain, abs=0.1)
    assert second["json"]["gain_db"] == pytest.approx(-20 * np.log10(0.675), abs=1.5)  # the peak
    assert first["json"]["target_duration"] == pytest.approx(1.25, abs=0.02)
    assert len(first["npy"]) == -(-round(first["json"]["target_duration"] * 16_000) // 640)


def test_a_corpus_behind_a_url(corpus, tmp_path):
    """The same shards; and the format that was found counts as the one that is named."""
    local = prepare(corpus, tmp_path / "local", **SMALL)
    real, opened = audio_reader.open_source, []

    def refuse(*args):
        raise InputError("stopped")

    with FolderServer(tmp_path) as server, pytest.MonkeyPatch.context() as patched:
        url = f"{server.url}/corpus.tar?sig="
        patched.setattr(pipeline, "_encode_stage", refuse)
        with pytest.raises(InputError, match="stopped"):
            prepare(url + "1", tmp_path / "out", **SMALL)
        patched.undo()
        # The list was made with another signature, which has expired.
        patched.setattr(audio_reader, "open_source", lambda path: opened.append(path) or real(path))
        record = prepare(url + "2", tmp_path / "out", **SMALL)
        assert set(opened) == {url + "2"}
        assert not record["reused"] and record["shards"] == local["shards"]
        assert prepare(url + "3", tmp_path / "out", **SMALL, format="webdataset")["reused"]


def test_a_mistake_leaves_nothing_behind(corpus, tmp_path):
    heldout, out = tmp_path / "h.tar", tmp_path / "out"
    write_corpus(heldout, recording("a", "ann", "heldout"))
    for source, output, change, message in (
        (corpus, out, {"samples_per_shard": 0}, "--samples-per-shard = 0"),
        (corpus, out, {"codec": "mp3"}, "known are: mel_dct"),
        (corpus, out, {"device": "cuda:99"}, "cuda:99"),
        (heldout, out, {}, "holds 1 usable recordings, but none for training"),
        (corpus, "/proc/nowhere/out", {}, "cannot be written"),
        (corpus, "/proc/out", {}, "OUTPUT = /proc/out/prepare.json cannot be written"),
    ):
        with pytest.raises(InputError, match=message):
            prepare(source, output, **SMALL | change)
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar", "h.tar"]
