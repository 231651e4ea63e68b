"""`titan-tts prepare --encode-text`: made once, completed after a kill, gone with their shards."""

from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers import speech_corpora as corpora
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from titan_tts.cli import main

SPEECH = {"each": 4, "voices": ("slt", "rms")}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def feature_files(output: Path) -> list[Path]:
    return sorted(output.glob("*/text_features/*/*.safetensors"))


def test_features_are_made_once(tmp_path, capsys):
    model = write_tiny_t5gemma2(tmp_path / "encoder")
    source = corpora.write_manifest(tmp_path / "corpus", corpora.speech(**SPEECH))
    output = tmp_path / "out"
    command = ["prepare", str(source), str(output), "--samples-per-shard", "3", "--workers", "1"]
    encode = [*command, "--encode-text", str(model)]

    assert main([*command, "--encode-text", "bytes"]) == 2
    assert "--encode-text bytes: the learned encoder" in capsys.readouterr().err
    assert not output.exists()

    assert main(command) == 0 and not feature_files(output)
    assert main(encode) == 0  # the shards were complete: only the features are made
    said = capsys.readouterr().out
    assert "was complete already" in said and "10 texts, 10 of them encoded now" in said
    files = feature_files(output)
    assert [path.parts[-4] for path in files] == ["heldout", "train", "train", "train"]

    # As a kill between two files leaves it.
    times = {path: path.stat().st_mtime_ns for path in files}
    content = files[2].read_bytes()
    files[2].unlink()
    (left := files[2].with_name(".killed.tmp")).touch()
    with FileLock(tmp_path / ".out.lock"):
        assert main(encode) == 2 and "another titan-tts prepare" in capsys.readouterr().err
    assert main(encode) == 0 and not left.exists()
    assert "10 texts, 3 of them encoded now" in capsys.readouterr().out
    assert files[2].read_bytes() == content
    assert [path for path in files if path.stat().st_mtime_ns != times[path]] == [files[2]]

    assert main([*command, "--overwrite", "--seed", "1"]) == 0  # features go with their shards
    assert not feature_files(output)
