"""Models of the hub, by a stub of it: what goes there, and what comes from there."""

import pytest
import torch

from tests.helpers.exported_run import export
from tests.helpers.sentences import refused
from titan_tts.cli import main
from titan_tts.speak.hub import find_folder
from titan_tts.speak.load_run import load_run


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_is_pushed_comes_back(hub, train, tmp_path, monkeypatch, capsys):
    assert train("run", "--training.steps=1") == 0
    folder = export(tmp_path / "run", tmp_path / "out", "--push=me/voice", "--private")
    assert f"{hub.url}/me/voice/commit/" in capsys.readouterr().out
    [made] = hub.created
    assert (made["organization"], made["name"]) == ("me", "voice")
    assert "private" in (made.get("visibility"), *made)  # each version of the library has its word
    assert files_in(folder) == hub.names("me/voice")
    # No other file comes to this machine.
    hub.files |= {"me/voice/pytorch_model.bin": b"", "me/voice/modeling.py": b"raise SystemExit"}
    there = find_folder("me/voice")
    assert files_in(there) == files_in(folder)
    own = dict(load_run(folder).model.named_parameters())
    for name, value in load_run(there).model.named_parameters():
        assert torch.equal(own[name], value)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert main(["export", "run", str(tmp_path / "other"), "--push=me/voice"]) == 2
    error = capsys.readouterr().err
    assert "the upload failed" in error and f"{tmp_path / 'other'} is complete" in error


def test_what_the_hub_does_not_have(hub, tmp_path):
    refused(lambda: find_folder("me/nothing"), "me/nothing is not a folder", "HF_TOKEN")
    # A mistake in a local name does not go to the hub, nor does a name that the hub cannot have.
    (tmp_path / "outputs").mkdir()
    for name in ("outputs/nmae", "run", "a/b/c", "../x"):
        assert str(find_folder(name)) == name
