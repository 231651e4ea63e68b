"""Exported data: the same samples as Parquet files, the same speech as audio, each with a card; continued, and refused
if it is another. Shards on the hub are trained from as those of a folder."""

import json
import shutil
import tarfile

import numpy as np
import pyarrow.parquet
import pytest
import soundfile
import yaml

from tests.helpers import speech_corpora as corpora
from tests.helpers.sentences import refused
from titan_tts.cli import main
from titan_tts.share import export_shard
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.data.storage import find_shards
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.codec import build_codec


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """14 recordings of two speakers, two of them held out, in shards of 5 samples."""
    folder = tmp_path_factory.mktemp("share")
    listed = corpora.write_tones(folder / "wavs", [f"utt{n}" for n in range(14)], seconds=0.71)
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"speaker": f"s{number % 2}", "split": "test" if number > 11 else "train"}
        row |= {"language": ("en", "de")[number % 2], "weight": 1.5 - number % 3 / 2}
        row["text_verbatim"] = f"er {row['text']}"
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpora.prepare(listed, folder / "data", samples_per_shard=5)
    return folder / "data"


def export(source, out, *options, workers=1):
    options = [f"--workers={workers}", *options]
    assert main(["data", "export", str(source), str(out), *options]) == 0
    return out


def without_hashes(metadata):
    return {name: value for name, value in metadata.items() if name != "xxh3_64"}


def samples_of(folder):
    """{key: (latents, reference, JSON)} of both splits."""
    found = {}
    for split in ("train", "heldout"):
        dataset = open_dataset(str(folder / split))
        for number in range(len(dataset)):
            loaded = dataset.load(number)
            found[dataset.key(number)] = (*loaded.arrays, without_hashes(loaded.metadata))
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


def test_parquet_files_have_the_samples_and_training_names_what_converts_them(
    prepared, parquet, tmp_path
):
    names = [*(f"train/shard-00000{n}.parquet" for n in range(3)), "heldout/shard-000000.parquet"]
    counts = {name: pyarrow.parquet.read_metadata(parquet / name).num_rows for name in names}
    assert list(counts.values()) == [5, 5, 2, 2]
    with pytest.raises(InputError, match="as titan-tts prepare .* makes them of .* Parquet"):
        open_dataset(str(parquet / "train"))
    assert main(["prepare", str(parquet), str(tmp_path / "again"), "--format=table"]) == 0
    first = samples_of(prepared)
    for found in (rows_of(parquet), samples_of(tmp_path / "again")):
        assert found.keys() == first.keys() and len(first) == 14
        for key, (latents, reference, metadata) in first.items():
            assert np.array_equal(found[key][0], latents) and len(reference) == 18
            assert np.array_equal(found[key][1], reference) and found[key][2] == metadata


@pytest.mark.parametrize("kind", ["mp3", "flac"])
def test_audio_is_what_the_codec_decodes(prepared, tmp_path, kind):
    out = export(prepared, tmp_path / "out", "--to=audio-tars", f"--audio={kind}")
    first, codec, found = samples_of(prepared), build_codec("mel_dct"), {}
    tars = sorted(out.rglob("*.tar"))
    names = ["heldout-shard-000000", *(f"train-shard-00000{n}" for n in range(3))]
    assert [path.stem for path in tars] == names
    for path in tars:
        with tarfile.open(path) as tar:
            for member in tar:
                key, suffix = member.name.split(".")
                found.setdefault(key, {})[suffix] = tar.extractfile(member).read()
    assert found.keys() == first.keys()
    for key, (latents, _, metadata) in first.items():
        split = "heldout" if key in ("utt12", "utt13") else "train"
        del metadata["reference_key"]
        assert json.loads(found[key]["json"]) == metadata | {"split": split}
        path = tmp_path / f"x.{kind}"
        path.write_bytes(found[key][kind])
        samples, rate = soundfile.read(path, dtype="float32")
        # The last frame has 10 ms of padding.
        assert rate == 16_000 and len(samples) == 11360 < len(latents) * codec.hop_length
        assert kind == "flac" or 7_000 < len(found[key][kind]) / 0.71 < 12_000
    corpora.prepare(out, tmp_path / "again", format="webdataset")
    again = samples_of(tmp_path / "again")
    assert {key.split("/")[-1] for key in again} == first.keys()
    for key, (latents, _, metadata) in again.items():
        of_first = first[key.split("/")[-1]]
        assert len(latents) == len(of_first[0]) and metadata["speaker"] == of_first[2]["speaker"]


def test_nothing_of_a_stored_reference_is_told_with_the_sound(tmp_path):
    """One recording or several, by any of the names."""
    stored = {"reference_key": "a", "reference_keys": ["a", "b"], "reference_parts": [2, 2]}
    samples = make_samples(3, channels=128)
    kept = [set(sample.metadata) - stored.keys() for sample in samples]
    for sample, (name, value) in zip(samples, stored.items(), strict=True):
        sample.metadata[name] = value
    write_shard(tmp_path / "two.tar", samples)
    options, told = ["--to=audio-tars", "--audio=flac", "--codec=mel_dct"], {}
    with tarfile.open(export(tmp_path / "two.tar", tmp_path / "out", *options) / "two.tar") as tar:
        for member in tar:
            if member.name.endswith(".json"):
                told[member.name] = set(json.load(tar.extractfile(member)))
    assert [told[f"{sample.key}.json"] for sample in samples] == kept


def test_a_stopped_export_is_continued_and_mixes_with_no_other(
    prepared, tmp_path, monkeypatch, capsys
):
    out, write, calls = tmp_path / "out", export_shard.write_parquet, []

    def failing(path, *rest):
        calls.append(path)
        if len(calls) == 3:
            raise InputError("stopped")
        write(path, *rest)

    monkeypatch.setattr(export_shard, "write_parquet", failing)
    arguments = ["data", "export", str(prepared), str(out), "--to=parquet", "--workers=1"]
    assert main(arguments) == 2 and not (out / "README.md").exists()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    assert len(times) == 2
    assert main(arguments) == 0 and len(calls) == 5
    assert len(rows_of(out)) == 14
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert main(arguments) == 0 and len(calls) == 5
    assert main([*arguments[:2], str(prepared / "train"), *arguments[3:]]) == 2
    assert main([*arguments, "--to=audio-tars"]) == 2
    assert "to was 'parquet', is 'audio-tars')" in capsys.readouterr().err
    sounds = ["data", "export", str(prepared), str(tmp_path / "sounds"), "--to=audio-tars"]
    assert main([*sounds, "--audio=flac"]) == 0 and main([*sounds, "--audio=mp3"]) == 2
    assert "audio was 'flac', is 'mp3')" in capsys.readouterr().err
    assert main(["data", "export", str(prepared), str(prepared), "--to=parquet"]) == 2
    assert "has files and no export.json; give a new OUT" in capsys.readouterr().err


def front_matter(folder):
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_the_card_tells_what_the_indexes_do(prepared, parquet, tmp_path, capsys):
    header, text = front_matter(parquet)
    assert header["language"] == ["de", "en"]
    [config] = header["configs"]
    files = [{"split": each, "path": f"{each}/*.parquet"} for each in ("train", "heldout")]
    assert config["data_files"] == files
    rows = "speakers | 2 ,samples | 14 ,hours of train | 0.002 ,hours of heldout | 0.000 ,14 stored"
    assert [row for row in rows.split(",") if row not in text] == []
    assert "| 16,000 Hz |" in text and "mel_dct, fingerprint " in text
    assert "prepare FOLDER DATA --format table" in text and "drawn" not in text
    out = export(prepared, tmp_path / "audio", "--to=audio-tars")
    header, text = front_matter(out)
    assert "configs" not in header and "samples | 14 " in text and "--format webdataset" in text
    (out / "README.md").write_text("mine")
    assert (export(prepared, out, "--to=audio-tars") / "README.md").read_text() == "mine"
    # Nothing but prepare.json, or the codec, tells how long a frame is.
    alone, latents = tmp_path / "alone.tar", np.zeros((3, 128), np.float16)
    write_shard(alone, [Triplet("a", latents, latents[:0], {"text": "x"})])
    assert main(["data", "export", str(alone), str(tmp_path / "y"), "--to=audio-tars"]) == 2
    assert "give the one that encoded it by --codec" in capsys.readouterr().err
    other = shutil.copytree(prepared, tmp_path / "other")
    record = json.loads((other / "prepare.json").read_text())
    record["settings"]["codec_fingerprint"] = "0" * 16
    (other / "prepare.json").write_text(json.dumps(record))
    assert main(["data", "export", str(other), str(tmp_path / "z"), "--to=audio-tars"]) == 2
    assert "is not the one that" in capsys.readouterr().err
    header, text = front_matter(export(alone, tmp_path / "table", "--to=parquet"))
    assert "hours of speech | **to fill in** " in text and "--data.references drawn" in text
    assert header["configs"][0]["data_files"] == [{"split": "train", "path": "*.parquet"}]


@pytest.mark.parametrize("to", ["parquet", "audio-tars"])
def test_what_is_private_is_left_out(tmp_path, capsys, to):
    listed = corpora.write_tones(tmp_path / "wavs", ["a", "b"], 0.3, speaker="s", split="train")
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    rows[0] |= {"annotator": "Jane"}
    rows[1] |= {"original": "/home/jane/a.wav"}
    rows[1] |= {"origin": {"url": ["s3://KEY:SECRET@bucket/x"]}}
    rows[1] |= {"phonemes": "/a/", "origin_name": "x/y.wav", "text": "/home/x, ~/y"}
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpora.prepare(listed, tmp_path / "data", samples_per_shard=1)
    out = export(tmp_path / "data", tmp_path / "out", f"--to={to}")
    assert "annotator, origin, original" in capsys.readouterr().out
    content = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert not [word for word in (b"Jane", b"jane", b"SECRET") if word in content]
    assert b'"phonemes": "/a/"' in content.replace(b'":"', b'": "') and b"x/y.wav" in content
    assert b"/home/x, ~/y" in content


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_shards_on_the_hub_are_trained_from(hub, prepared, train, tmp_path, monkeypatch):
    files = {
        str(path.relative_to(prepared)): path.read_bytes()
        for path in prepared.rglob("*")
        if path.is_file()
    }
    hub.files |= {f"datasets/me/corpus/{name}": content for name, content in files.items()}
    local = open_dataset(str(prepared / "train"))
    for path in ("hf://datasets/me/corpus@v1.0/train", "hf://me/corpus/train/*.tar"):
        dataset = open_dataset(path)
        assert dataset.fingerprint == local.fingerprint
        assert dataset.load(3).metadata == local.load(3).metadata
    # Samples alone were asked for: with the index beside it no shard is read from end to end.
    whole = {f"bytes=0-{len(files[name]) - 1}" for name in files if name.endswith(".tar")}
    assert len(hub.ranges) > 10 and not whole & set(hub.ranges)
    ids = {}
    settings = ["--training.steps=3", "--data.audit", "--data.max-frames=40"]
    for name, path in (("here", str(prepared / "train")), ("there", "hf://me/corpus/train")):
        assert train(name, f"--data.path={path}", "--data.latent-channels=128", *settings) == 0
        [audit] = (tmp_path / name / "audit").iterdir()
        ids[name] = audit.read_text()
    assert ids["here"] == ids["there"] and "shard-000001:utt" in ids["here"]
    monkeypatch.setattr(remote, "TRIES", 1)
    listing = "hf://me/none/train"
    refused(lambda: find_shards(listing), f"{listing}: cannot be listed", "HF_TOKEN")
    refused(lambda: open_dataset("hf://me/corpus/x.tar"), "not found", "check OWNER/NAME")
