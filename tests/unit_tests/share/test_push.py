"""Data on the hub: pushed with a card, and trained from as from the folder."""

import json
import os
import shutil

import pytest
import yaml

from tests.helpers import speech_corpora as corpora
from tests.helpers.sentences import refused
from titan_tts.cli import main
from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.storage import find_shards


@pytest.fixture
def data(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "data")


def front_matter(folder):
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_is_pushed_is_trained_from(hub, data, train, capsys, tmp_path):
    (data / "train/mine").mkdir()
    (data / "train/mine/x.safetensors").write_bytes(b"")
    (data / "backup").mkdir()
    (data / "backup/home.tar").write_bytes(b"mine")
    assert main(["data", "push", str(data), "me/corpus", "--license=cc0-1.0"]) == 0
    assert hub.private == {"datasets/me/corpus": True}
    out = capsys.readouterr().out
    assert f"{hub.url}/datasets/me/corpus/commit/" in out and "hf://me/corpus/train" in out
    tars = [
        f"{split}/shard-00000{n}.tar"
        for split, n in (("train", 0), ("train", 1), ("train", 2), ("heldout", 0))
    ]
    expected = ["README.md", "prepare.json", *tars, *(f"{tar}.idx" for tar in tars)]
    assert hub.names("datasets/me/corpus") == sorted(expected)
    local = open_dataset(str(data / "train"))
    for path in ("hf://datasets/me/corpus@v1.0/train", "hf://me/corpus/train/*.tar"):
        dataset = open_dataset(path)
        assert dataset.fingerprint == local.fingerprint
        assert dataset.load(3).metadata == local.load(3).metadata
    # Samples alone were asked for: with the index beside it no shard is read from end to end.
    whole = {f"bytes=0-{len(hub.files[f'datasets/me/corpus/{tar}']) - 1}" for tar in tars}
    assert len(hub.ranges) > 10 and not whole & set(hub.ranges)
    ids = {}
    settings = ["--training.steps=3", "--data.audit", "--data.max-frames=40"]
    for name, path in (("here", str(data / "train")), ("there", "hf://me/corpus/train")):
        assert train(name, f"--data.path={path}", "--data.latent-channels=128", *settings) == 0
        [audit] = (tmp_path / name / "audit").iterdir()
        ids[name] = audit.read_text()
    assert ids["here"] == ids["there"] and "shard-000001:utt" in ids["here"]


def test_the_card_tells_what_the_indexes_do(data, tmp_path):
    assert main(["data", "push", str(data), "me/corpus", "--card-only", "--license=cc0-1.0"]) == 0
    header, text = front_matter(data)
    assert header["license"] == "cc0-1.0" and header["language"] == ["de", "en"]
    assert "configs" not in header
    rows = "speakers | 2 ,samples | 14 ,hours of train | 0.002 ,hours of heldout | 0.000 ,14 stored"
    assert [row for row in rows.split(",") if row not in text] == []
    (data / "README.md").write_text("mine")
    assert main(["data", "push", str(data), "me/corpus", "--card-only"]) == 0
    assert (data / "README.md").read_text() == "mine"
    for options in (["--to=parquet", "--references=drop"], ["--to=audio-tars"]):
        out = tmp_path / options[0]
        assert main(["data", "export", str(data), str(out), "--workers=1", *options]) == 0
        assert main(["data", "push", str(out), "me/corpus", "--card-only"]) == 0
        header, text = front_matter(out)
        assert "samples | 14 " in text and header["language"] == ["de", "en"]
        assert ("configs" in header) == ("--to=parquet" in options)
        if "--to=audio-tars" in options:
            assert not list(out.rglob("*.idx"))
            continue
        [config] = header["configs"]
        assert {"split": "train", "path": "train/*.parquet"} in config["data_files"]
        assert "references | drawn in training" in text
        assert "titan-tts prepare FOLDER DATA --format table" in text
        assert "--data.path DATA/train --data.references drawn" in text
    # Nothing but prepare.json, or the codec, tells how long a frame is.
    (data / "prepare.json").unlink()
    (data / "README.md").unlink()
    assert main(["data", "push", str(data), "me/corpus", "--card-only"]) == 0
    assert "hours of train | **to fill in** " in front_matter(data)[1]


def push(*options):
    return main(["data", "push", *map(str, options)])


def test_what_the_hub_refuses_is_one_sentence(hub, data, monkeypatch, capsys):
    monkeypatch.setattr(remote, "TRIES", 1)
    listing = "hf://me/none/train"
    refused(lambda: find_shards(listing), f"{listing}: cannot be listed", "HF_TOKEN")
    hub.files["datasets/me/corpus/a.txt"] = b""
    missing = "hf://me/corpus/x.tar"
    refused(lambda: open_dataset(missing), "not found", "check OWNER/NAME, @REVISION")
    assert push(data, "corpus") == 2 and push(data / "none", "me/corpus") == 2
    error = capsys.readouterr().err
    assert "give OWNER/NAME" in error and "is no folder" in error
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert push(data, "me/corpus") == 2
    assert "the upload failed" in capsys.readouterr().err


def test_a_public_dataset_is_asked_for_and_is_no_mixture(hub, data, capsys):
    assert push(data, "me/corpus", "--public") == 0 and not hub.private["datasets/me/corpus"]
    assert push(data, "me/corpus") == 2
    assert "me/corpus: is public" in capsys.readouterr().err
    there = "datasets/me/other"
    old = {"README.md": b"theirs"}
    old |= dict.fromkeys(("train/shard-000077.tar", "train/shard-000000.parquet"), b"x")
    hub.private[there] = True
    hub.files |= {f"{there}/{name}": content for name, content in old.items()}
    assert push(data, "me/other", "--public", "--replace") == 2
    assert "me/other: is private" in capsys.readouterr().err
    assert push(data, "me/other") == 2 and hub.names(there) == sorted(old)
    error = capsys.readouterr().err
    assert "'train/shard-000000.parquet', 'train/shard-000077.tar' there" in error
    assert push(data, "me/other", "--replace") == 0
    assert "README.md of me/other is kept" in capsys.readouterr().out
    assert not set(list(old)[1:]) & set(hub.names(there)) and len(hub.names(there)) == 10
    assert hub.files[f"{there}/README.md"] == b"theirs"


def test_what_is_not_complete_is_not_pushed(data, tmp_path, capsys):
    tables = tmp_path / "out"
    assert main(["data", "export", str(data), str(tables), "--to=parquet", "--workers=1"]) == 0
    shutil.rmtree(data / "heldout")
    os.truncate(data / "train/shard-000001.tar", 10_240)
    assert push(data, "me/corpus", "--card-only") == 2
    names = "'heldout/shard-000000.tar', 'train/shard-000001.tar' unfinished, missing, cut"
    assert names in capsys.readouterr().err
    for name, content in (
        ("export.json", b'{"to": "parquet"}'),
        ("heldout/x.parquet", b""),
        ("train/shard-000001.parquet", b"PAR1"),
    ):
        kept = (tables / name).read_bytes() if (tables / name).exists() else None
        (tables / name).write_bytes(content)
        assert push(tables, "me/corpus", "--card-only") == 2
        named = "heldout/shard-000000.parquet" if name == "export.json" else name
        assert f"'{named}'" in capsys.readouterr().err
        (tables / name).unlink() if kept is None else (tables / name).write_bytes(kept)
    assert push(tables, "me/corpus", "--card-only") == 0


PRIVATE = {"annotator": "Jane", "original": "/home/jane/a.wav"}
PRIVATE |= {"origin": {"url": ["s3://KEY:SECRET@bucket/x"]}}


@pytest.mark.parametrize("to", ["parquet", "audio-tars"])
def test_what_is_private_is_left_out(tmp_path, capsys, to):
    listed = corpora.write_tones(tmp_path / "wavs", ["a", "b"], 0.3, speaker="s", split="train")
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    rows[1] |= PRIVATE | {"phonemes": "/a/", "origin_name": "x/y.wav", "text": "/home/x, ~/y"}
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, out = tmp_path / "data", tmp_path / "out"
    corpora.prepare(listed, data)
    assert push(data, "me/corpus", "--card-only") == 2
    error = capsys.readouterr().err
    assert "'annotator', 'origin', 'original'" in error and "shard-000000:b" in error
    assert "titan-tts data export" in error
    assert main(["data", "export", str(data), str(out), f"--to={to}", "--workers=1"]) == 0
    assert "annotator, origin, original" in capsys.readouterr().out
    assert push(out, "me/corpus", "--card-only") == 0
    content = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert not [word for word in (b"Jane", b"jane", b"SECRET") if word in content]
    assert b'"phonemes": "/a/"' in content.replace(b'":"', b'": "') and b"x/y.wav" in content
    assert b"/home/x, ~/y" in content
