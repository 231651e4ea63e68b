"""Exported data: the same samples as Parquet files, the same speech as audio; continued, and refused if it is another."""

import json
import re
import shlex
import tarfile

import numpy as np
import pyarrow.parquet
import pytest
import soundfile

from tests.helpers import speech_corpora as corpora
from titan_tts.cli import main
from titan_tts.share import export_shard
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.codec import build_codec

LEFT_OUT = {"xxh3_64", "reference_key"}


def export(source, out, *options, workers=1):
    options = [f"--workers={workers}", *options]
    assert main(["data", "export", str(source), str(out), *options]) == 0
    return out


def samples_of(folder):
    """{key: (latents, reference, JSON)} of both splits."""
    found = {}
    for split in ("train", "heldout"):
        dataset = open_dataset(str(folder / split))
        for number in range(len(dataset)):
            loaded = dataset.load(number)
            found[dataset.key(number)] = loaded.latents, loaded.reference, loaded.metadata
    return found


@pytest.fixture(scope="module")
def parquet(prepared, tmp_path_factory):
    """Of two processes."""
    return export(prepared, tmp_path_factory.mktemp("export") / "out", "--to=parquet", workers=2)


def rows_of(folder):
    """{key: (latents, reference, JSON)} of all exported tables."""
    found = {}
    for path in sorted(folder.rglob("*.parquet")):
        for row in pyarrow.parquet.read_table(path).to_pylist():
            lengths = {"latents": row["frames"], "reference": row["reference_frames"]}
            arrays = [np.frombuffer(row[k], "<f2").reshape(n, 128) for k, n in lengths.items()]
            found[row["key"]] = (*arrays, json.loads(row["metadata"]))
    return found


def test_parquet_files_have_the_same_samples(prepared, parquet):
    ours, theirs = rows_of(parquet), samples_of(prepared)
    assert ours.keys() == theirs.keys() and len(ours) == 14
    for key, (latents, reference, metadata) in theirs.items():
        assert np.array_equal(ours[key][0], latents) and np.array_equal(ours[key][1], reference)
        assert ours[key][2] == metadata
    record = json.loads((parquet / "prepare.json").read_text())
    assert {name: each["samples"] for name, each in record["shards"].items()} == {
        "train/shard-000000.parquet": 5,
        "train/shard-000001.parquet": 5,
        "train/shard-000002.parquet": 2,
        "heldout/shard-000000.parquet": 2,
    }
    state = json.loads((parquet / "export.json").read_text())["shards"]
    assert state == {name: (parquet / name).stat().st_size for name in record["shards"]}


def test_training_refuses_them_and_names_what_converts_them(prepared, parquet, tmp_path):
    with pytest.raises(InputError, match="is Parquet, which training does not read; ") as error:
        open_dataset(str(parquet / "train"))
    command = re.search("by titan-tts (prepare .*), and give", str(error.value))[1]
    assert main(shlex.split(command.replace("OUTPUT", str(tmp_path / "again")))) == 0
    first, again = samples_of(prepared), samples_of(tmp_path / "again")
    assert first.keys() == again.keys() and len(first) == 14
    for key, (latents, reference, metadata) in first.items():
        assert np.array_equal(again[key][0], latents) and np.array_equal(again[key][1], reference)
        assert {**again[key][2], "xxh3_64": 0} == {**metadata, "xxh3_64": 0}


def test_references_are_dropped(prepared, tmp_path):
    out = export(prepared, tmp_path / "out", "--to=parquet", "--references=drop")
    first = samples_of(prepared)
    for key, (latents, reference, metadata) in rows_of(out).items():
        assert np.array_equal(latents, first[key][0]) and reference.shape == (0, 128)
        expected = {name: v for name, v in first[key][2].items() if name not in LEFT_OUT}
        assert {name: v for name, v in metadata.items() if name != "xxh3_64"} == expected
    assert json.loads((out / "prepare.json").read_text())["settings"]["references"] == 0


@pytest.mark.parametrize("kind", ["mp3", "flac"])
def test_audio_is_what_the_codec_decodes(prepared, tmp_path, kind, monkeypatch):
    out = export(prepared, tmp_path / "out", "--to=audio-tars", f"--audio={kind}")
    first, codec, found = samples_of(prepared), build_codec("mel_dct"), {}
    tars = sorted(out.rglob("*.tar"))
    names = ["heldout-shard-000000", *(f"train-shard-00000{n}" for n in range(3))]
    assert [path.stem for path in tars] == names
    other = "--audio=" + ("flac" if kind == "mp3" else "mp3"), "--to=audio-tars", "--workers=1"
    assert main(["data", "export", str(prepared), str(out), *other]) == 2
    for path in tars:
        with tarfile.open(path) as tar:
            for member in tar:
                key, suffix = member.name.split(".")
                found.setdefault(key, {})[suffix] = tar.extractfile(member).read()
    assert found.keys() == first.keys()
    for key, (latents, _, metadata) in first.items():
        split = "heldout" if key in ("utt12", "utt13") else "train"
        own = {name: value for name, value in metadata.items() if name not in LEFT_OUT}
        assert json.loads(found[key]["json"]) == own | {"split": split}
        path = tmp_path / f"x.{kind}"
        path.write_bytes(found[key][kind])
        samples, rate = soundfile.read(path, dtype="float32")
        # The last frame has 10 ms of padding.
        assert rate == 16_000 and len(samples) == 11360 < len(latents) * codec.hop_length
        assert kind == "flac" or 7_000 < 8 * len(found[key][kind]) / 0.71 / 8 < 12_000
    corpora.prepare(out, tmp_path / "again", format="webdataset")
    again = samples_of(tmp_path / "again")
    assert {key.split("/")[-1] for key in again} == first.keys()
    for key, (latents, _, metadata) in again.items():
        of_first = first[key.split("/")[-1]]
        assert len(latents) == len(of_first[0]) and metadata["speaker"] == of_first[2]["speaker"]


def test_nothing_of_a_stored_reference_is_told_with_the_sound(prepared, tmp_path, capsys):
    """One recording or several, by any of the names. Without a reference that joins recordings a speaker is lost."""
    told = {}
    stored = {"reference_key": "a", "reference_keys": ["a", "b"], "reference_parts": [2, 2]}
    samples = make_samples(3, channels=128)
    kept = [set(sample.metadata) - stored.keys() for sample in samples]
    for sample, (name, value) in zip(samples, stored.items(), strict=True):
        sample.metadata[name] = value
    write_shard(tmp_path / "two.tar", samples)
    options = ["--to=audio-tars", "--audio=flac", "--codec=mel_dct"]
    with tarfile.open(export(tmp_path / "two.tar", tmp_path / "out", *options) / "two.tar") as tar:
        for member in tar:
            if member.name.endswith(".json"):
                told[member.name] = set(json.load(tar.extractfile(member)))
    assert [told[f"{sample.key}.json"] for sample in samples] == kept
    dropped = [str(tmp_path / "two.tar"), str(tmp_path / "none"), "--to=parquet"]
    assert main(["data", "export", *dropped, "--references=drop", "--workers=1"]) == 2
    assert f"the reference of sample 'two:{samples[2].key}'" in capsys.readouterr().err


def test_a_stopped_export_is_continued(prepared, tmp_path, monkeypatch, capsys):
    out, write, calls = tmp_path / "out", export_shard.write_parquet, []

    def failing(path, *rest):
        calls.append(path)
        if len(calls) == 3:
            raise InputError("stopped")
        write(path, *rest)

    monkeypatch.setattr(export_shard, "write_parquet", failing)
    arguments = ["data", "export", str(prepared), str(out), "--to=parquet", "--workers=1"]
    assert main(arguments) == 2
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    assert len(times) == 2
    assert main(arguments) == 0 and len(calls) == 5
    assert len(rows_of(out)) == 14
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert main(arguments) == 0 and len(calls) == 5
    path = out / "train/shard-000001.parquet"  # one that was cut is written again
    before = path.read_bytes()
    path.write_bytes(before[:99])
    assert main(arguments) == 0 and path.read_bytes() == before and len(calls) == 6
    # Another export does not mix with it, nor with a folder of something else.
    assert main([*arguments, "--references=drop"]) == 2
    assert main([*arguments[:2], str(prepared / "train"), *arguments[3:]]) == 2
    assert main([*arguments, "--to=audio-tars"]) == 2
    assert "to was 'parquet', is 'audio-tars');" in capsys.readouterr().err
    assert main(["data", "export", str(prepared), str(prepared), "--to=parquet"]) == 2


def test_what_cannot_be_exported(prepared, tmp_path, capsys):
    tars = str(prepared / "train")
    (prepared / "prepare.json").rename(prepared / "away")
    try:
        assert main(["data", "export", tars, str(tmp_path / "y"), "--to=audio-tars"]) == 2
    finally:
        (prepared / "away").rename(prepared / "prepare.json")
    assert "give the one that encoded it by --codec" in capsys.readouterr().err
