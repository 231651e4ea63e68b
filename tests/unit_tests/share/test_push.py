"""Data on the hub: pushed with a card, and trained from as from the folder."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

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
    (data / "train/text_features").mkdir()
    (data / "train/text_features/x.safetensors").write_bytes(b"")
    assert main(["data", "push", str(data), "me/corpus", "--private", "--license=cc0-1.0"]) == 0
    out = capsys.readouterr().out
    assert f"{hub.url}/datasets/me/corpus/commit/" in out and "hf://me/corpus/train" in out
    tars = [
        f"{split}/shard-00000{n}.tar"
        for split, n in (("train", 0), ("train", 1), ("train", 2), ("heldout", 0))
    ]
    expected = ["README.md", "prepare.json", *tars, *(f"{tar}.idx" for tar in tars)]
    assert hub.names("datasets/me/corpus") == sorted(expected)
    local = open_dataset(str(data / "train"))
    for path in (
        "hf://me/corpus/train",
        "hf://datasets/me/corpus@v1.0/train",
        "hf://me/corpus/train/*.tar",
    ):
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
    assert header["license"] == "cc0-1.0" and header["language"] == ["en"]
    assert header["size_categories"] == ["n<1K"] and "configs" not in header
    for row in (
        "speakers | 2 ",
        "samples | 14 ",
        "hours of train | 0.002 ",
        "codec | mel_dct, fingerprint",
        "16,000 Hz",
        "14 stored",
        "25 frames per second",
        "4 tar files",
    ):
        assert row in text, row
    (data / "README.md").write_text("mine")
    assert main(["data", "push", str(data), "me/corpus", "--card-only"]) == 0
    assert (data / "README.md").read_text() == "mine"
    out = tmp_path / "parquet"
    for options in (["--to=parquet", "--references=drop"], ["--to=audio-tars"]):
        shutil.rmtree(out, ignore_errors=True)
        assert main(["data", "export", str(data), str(out), "--workers=1", *options]) == 0
        assert main(["data", "push", str(out), "me/corpus", "--card-only"]) == 0
        header, text = front_matter(out)
        assert "samples | 14 " in text and header["language"] == ["en"]
        if "--to=audio-tars" in options:
            assert (
                "configs" not in header and "Speech as mp3" in text and not list(out.rglob("*.idx"))
            )
            continue
        [config] = header["configs"]
        assert {"split": "train", "path": "train/*.parquet"} in config["data_files"]
        assert "references | drawn in training" in text
        assert "--data.path hf://me/corpus/train --data.references drawn" in text


def test_what_the_hub_refuses_is_one_sentence(hub, data, monkeypatch, capsys):
    monkeypatch.setattr(remote, "TRIES", 1)
    refused(
        lambda: find_shards("hf://me/none/train"),
        "hf://me/none/train: cannot be listed",
        "HF_TOKEN",
    )
    hub.files["datasets/me/corpus/a.txt"] = b""
    refused(
        lambda: open_dataset("hf://me/corpus/x.tar"), "not found", "check OWNER/NAME, @REVISION"
    )
    assert main(["data", "push", str(data), "corpus"]) == 2
    assert main(["data", "push", str(data / "none"), "me/corpus"]) == 2
    error = capsys.readouterr().err
    assert "give OWNER/NAME" in error and "is no folder" in error
    assert main(["data", "export", str(data), "out", "--to=parquet", "--workers=1"]) == 0
    Path("out/train/shard-000001.parquet").unlink()
    assert main(["data", "push", "out", "me/corpus"]) == 2
    assert "has 3 files of an export of 4" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert main(["data", "push", str(data), "me/corpus"]) == 2
    assert "the upload failed" in capsys.readouterr().err
    assert json.loads((data / "prepare.json").read_text())["sample_rate"] == 16_000
