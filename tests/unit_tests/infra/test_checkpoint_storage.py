"""Checkpoints on disk: complete or absent, verified, and read without running anything."""

import json
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra import checkpoint_storage as storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TRAINED_WITH = {"objective.prediction": "velocity"}


def state() -> dict:
    weights = torch.arange(12.0).reshape(3, 4)
    return {"weights": weights, "loader": {"batch": 7, "order": "a"}, "betas": (0.9, 0.95)}


def save(path, content) -> None:
    dcp.save(content, storage_writer=storage.CheckpointWriter(path, TRAINED_WITH), no_dist=True)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "step-4", state())
    return tmp_path / "step-4"


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_is_saved_is_loaded_and_verified(saved):
    found = {"weights": torch.zeros(3, 4), "loader": {"batch": 0, "order": ""}, "betas": (0, 0)}
    storage.load_checkpoint(found, saved, no_dist=True)
    expected = state()
    assert torch.equal(found.pop("weights"), expected.pop("weights")) and found == expected
    manifest = storage.read_manifest(saved)
    assert manifest["trained_with"] == TRAINED_WITH
    assert set(manifest["files"]) == {p.name for p in saved.iterdir()} - {storage.MANIFEST}
    assert storage.verify(saved) is None
    assert os.listdir(saved.parent) == ["step-4"]


def test_a_table_of_any_python_is_read(saved):
    """3.13 alone pickles paths as pathlib._local's; tables have none by now."""
    table = saved / ".metadata"
    assert b"pathlib" not in table.read_bytes()
    old = Metadata({}, storage_meta=StorageMeta(saved))
    for name in (b"pathlib", b"pathlib._local"):
        content = pickle.dumps(old, 2).replace(b"cpathlib._local\n", b"cpathlib\n")
        table.write_bytes(content.replace(b"cpathlib\n", b"c" + name + b"\n"))
        assert storage.read_table(saved) == old


def flip(path, offset=-1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def in_manifest(folder, change) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def fifo(path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path, target) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (lambda f: flip(f / "__0_0.distcp", 3000), "__0_0.distcp has other content"),
        (lambda f: flip(f / ".metadata"), ".metadata has other content"),
        (lambda f: os.truncate(f / "__0_0.distcp", 100), "__0_0.distcp has other bytes"),
        (lambda f: (f / ".metadata").unlink(), ".metadata cannot be read"),
        (lambda f: (f / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda f: os.truncate(f / "manifest.json", 40), "manifest.json is corrupt"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json is corrupt"),
        (lambda f: (f / "manifest.json").write_text("[" * 10**5), "manifest.json is corrupt"),
        (lambda f: in_manifest(f, {"files": {"a": 3}}), "manifest.json is corrupt"),
        (lambda f: fifo(f / "manifest.json"), "no readable manifest.json (is no regular file)"),
        (lambda f: fifo(f / "__0_0.distcp"), "cannot be read (is no regular file)"),
        (lambda f: link(f / ".metadata", "/dev/zero"), "cannot be read (is no regular file)"),
    ],
)
def test_corruption_is_named(saved, corrupt, sentence):
    corrupt(saved)
    assert sentence in storage.verify(saved)


def test_processes_share_the_files(saved):
    assert storage.verify(saved, (0, 2)) is storage.verify(saved, (1, 2)) is None
    flip(saved / ".metadata")
    assert sum(storage.verify(saved, (rank, 2)) is not None for rank in (0, 1)) == 1


@pytest.mark.parametrize("deep", [False, True])
def test_a_table_with_a_payload_runs_nothing(saved, tmp_path, deep):
    payload = Payload(tmp_path / "ran")
    table = Metadata({}, planner_data={"a": payload}, storage_data={}) if deep else payload
    (saved / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(InputError, match="not read, as it could run code: it names posix.mkdir"):
        storage.load_checkpoint(state(), saved, no_dist=True)
    assert not (tmp_path / "ran").exists()
    (saved / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(InputError, match="cannot be read"):
        storage.read_table(saved)


def test_an_entry_with_a_payload_runs_nothing(tmp_path):
    save(tmp_path / "step-1", state() | {"betas": Payload(tmp_path / "ran")})
    with pytest.raises(InputError, match="the entry betas is no plain value.*posix.mkdir"):
        storage.load_checkpoint(state(), tmp_path / "step-1", no_dist=True)
    assert not (tmp_path / "ran").exists()
    with warnings.catch_warnings():  # the payload is alive: torch's own reader runs it
        warnings.simplefilter("ignore")
        dcp.load(state(), checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert (tmp_path / "ran").exists()


def test_a_save_that_is_cut_leaves_no_checkpoint(tmp_path, monkeypatch):
    def killed(*_):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_atomic", killed)
        with pytest.raises(BaseException, match="killed"):
            save(tmp_path / "step-4", state())
    assert os.listdir(tmp_path) == ["step-4.saving"]
    assert storage.checkpoint_steps(tmp_path) == []
    assert storage.remove_left_behind(tmp_path) == ["step-4.saving"]
    save(tmp_path / "step-4", state())
    save(tmp_path / "step-4", state())  # once more, as after a roll back
    assert storage.verify(tmp_path / "step-4") is None


def test_names_are_exact(tmp_path):
    theirs = ["step-4-export", "step-best", "step-04.saving", "step-4.saving.old", "my-step-3"]
    for name in [*theirs, "step-2", "step-10", "step-3.saving", "step-1.deleting"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-5.saving").write_text("a file")
    (tmp_path / "step-6").write_text("a file")
    (tmp_path / "step-7").symlink_to(tmp_path / "gone")
    (tmp_path / "step-8").symlink_to(tmp_path / "step-2")
    (tmp_path / "step-9.saving").symlink_to(tmp_path / "step-2")
    assert storage.checkpoint_steps(tmp_path) == [2, 8, 10]
    assert storage.remove_left_behind(tmp_path) == ["step-1.deleting", "step-3.saving"]
    kept = {*theirs, "step-2", "step-10", "step-5.saving", "step-6", "step-7", "step-8"}
    assert set(os.listdir(tmp_path)) == kept | {"step-9.saving"}
    assert storage.checkpoint_steps(tmp_path / "none") == []


def test_removed_and_set_aside(saved):
    first = storage.set_aside(saved)
    save(saved, state())
    assert [first.name, storage.set_aside(saved).name] == ["step-4.corrupt", "step-4.corrupt-2"]
    save(saved, state())
    storage.remove_checkpoint(saved)
    assert sorted(os.listdir(saved.parent)) == ["step-4.corrupt", "step-4.corrupt-2"]


def test_the_writer_reaches_a_process_that_saves(tmp_path):
    writer = storage.CheckpointWriter(tmp_path / "step-4", TRAINED_WITH)
    again = pickle.loads(pickle.dumps(writer))
    assert (again.final_path, again.trained_with) == (tmp_path / "step-4", TRAINED_WITH)
    assert json.loads(json.dumps(TRAINED_WITH)) == TRAINED_WITH
