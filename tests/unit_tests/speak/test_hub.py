"""Models of the hub, by a stub of it: what goes there, and what comes from there."""

import pytest
import torch

from tests.helpers.exported_run import export
from tests.helpers.sentences import refused
from titan_tts.cli import main
from titan_tts.speak.hub import find_folder
from titan_tts.speak.load_run import load_run
from tools.harness.hub_server import HubServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    with HubServer(token="secret") as server:
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "secret")
        find_folder.cache_clear()
        yield server
        find_folder.cache_clear()


@pytest.mark.long
def test_what_is_pushed_comes_back(hub, train, tmp_path, capsys):
    assert train("run", "--training.steps=2") == 0
    folder = export(tmp_path / "run", tmp_path / "out", "--push=me/voice", "--private")
    assert f"{hub.url}/me/voice/commit/" in capsys.readouterr().out
    [made] = hub.created
    assert (made["organization"], made["name"]) == ("me", "voice")
    assert "private" in (
        made.get("visibility"),
        *made,
    )  # another word in each version of the library
    files = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
    assert sorted(files) == hub.names("me/voice")

    # Of what else is there nothing comes to this machine.
    hub.files |= {"me/voice/pytorch_model.bin": b"", "me/voice/modeling.py": b"raise SystemExit"}
    there = find_folder("me/voice")
    assert sorted(str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()) == sorted(
        files
    )
    own = dict(load_run(folder).model.named_parameters())
    for name, value in load_run(there).model.named_parameters():
        assert torch.equal(own[name], value)


def test_what_the_hub_does_not_have(hub, monkeypatch, capsys, tmp_path):
    refused(lambda: find_folder("me/nothing"), "me/nothing is no folder", "HF_TOKEN")
    # A mistake in a local name does not go to the hub, nor does what is no name of the hub's.
    (tmp_path / "outputs").mkdir()
    for name in ("outputs/nmae", "run", "a/b/c", "../x"):
        assert str(find_folder(name)) == name
    assert main(["generate", "outputs/nmae", "--text=a", "--speaker=b"]) == 2
    assert "outputs/nmae is no run's folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_hub_that_refuses(hub, train, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert train("run", "--training.steps=2") == 0
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out), "--push=me/voice"]) == 2
    error = capsys.readouterr().err
    assert "--push me/voice: the hub did not take it" in error and f"{out} is complete" in error
    assert load_run(out).step == 2
