"""Models of the hub, by a stub of it."""

import pytest
import torch

from tests.helpers.exported_run import export
from tests.helpers.sentences import refused
from titan_tts.speak.load_run import load_run
from titan_tts.speak.open_run import find_folder


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_model_of_the_hub_without_files_of_others(hub, train, tmp_path):
    assert train("run", "--training.steps=1") == 0
    folder = export(tmp_path / "run", tmp_path / "out")
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    hub.files |= {f"me/voice/{name}": path.read_bytes() for name, path in paths.items()}
    hub.files |= {"me/voice/pytorch_model.bin": b"", "me/voice/modeling.py": b"raise SystemExit"}
    there = find_folder("me/voice")
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert found == {*paths}
    own = dict(load_run(folder).model.named_parameters())
    for name, value in load_run(there).model.named_parameters():
        assert torch.equal(own[name], value)


def test_what_the_hub_does_not_have(hub, tmp_path):
    refused(lambda: find_folder("me/nothing"), "me/nothing is not a folder", "HF_TOKEN")
    # A mistake in a local name does not go to the hub, nor does a name that the hub cannot have.
    (tmp_path / "outputs").mkdir()
    for name in ("outputs/nmae", "run", "a/b/c", "../x"):
        assert str(find_folder(name)) == name
