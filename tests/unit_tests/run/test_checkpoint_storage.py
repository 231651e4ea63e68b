"""Checkpoints on disk: complete or absent, verified, and read without running anything."""

import os
import pickle
import shutil
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
)

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.run import checkpoint_storage as storage
from torchtitan.models.dit_tts.run import manifest

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


def test_a_checkpoint_without_another_machines_files_is_none(tmp_path, monkeypatch):
    """As where each machine has a run folder of its own under one path."""
    write = storage.CheckpointWriter.write_data

    def elsewhere(self, *plan):
        written = write(self, *plan)
        (Path(self.path) / "__0_0.distcp").rename(tmp_path / "on_another_machine")
        return written

    monkeypatch.setattr(storage.CheckpointWriter, "write_data", elsewhere)
    with pytest.raises(
        CheckpointException, match=r"__0_0.distcp of another .* do not share the run folder"
    ):
        save(tmp_path / "step-4", state())
    assert not (tmp_path / "step-4").exists()


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def test_what_is_saved_is_loaded_and_verified(saved):
    found = {"weights": torch.zeros(3, 4), "loader": {"batch": 0, "order": ""}, "betas": (0, 0)}
    storage.load_checkpoint(found, saved, no_dist=True)
    expected = state()
    assert torch.equal(found.pop("weights"), expected.pop("weights")) and found == expected
    content = manifest.read_manifest(saved)
    assert content["trained_with"] == TRAINED_WITH
    assert set(content["files"]) == {p.name for p in saved.iterdir()} - {manifest.MANIFEST}
    assert storage.verify(saved) is None
    assert os.listdir(saved.parent) == ["step-4"]


def test_tables_of_other_pythons_are_read(saved):
    """One that DCP itself wrote under Debian's Python 3.11.2, of the same state; and 3.13's paths."""
    new, table = storage.read_table(saved), saved / ".metadata"
    shutil.copy(Path(__file__).parent / "table_of_python_3.11.2.pickle", table)
    assert b"getattr" in table.read_bytes()
    manifest.write_manifest(saved, ["__0_0.distcp", ".metadata"], TRAINED_WITH)
    assert storage.verify(saved) is None
    found = storage.read_table(saved)
    weights = found.state_dict_metadata["weights"]
    assert weights.properties.memory_format is torch.contiguous_format
    assert weights.size == (3, 4) and weights == new.state_dict_metadata["weights"]
    assert set(found.state_dict_metadata) == {"weights", "loader.batch", "betas"}
    old = Metadata({}, storage_data={"a": 1}, storage_meta=StorageMeta(saved))
    content = pickle.dumps(old, 2).replace(b"cpathlib._local\n", b"cpathlib\n")
    table.write_bytes(content.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert storage.read_table(saved) == old


@pytest.mark.parametrize(
    "content, sentence",
    [
        (Call(getattr, _MEM_FORMAT_ENCODING, "mro"), "it takes 'mro'"),
        (Call(getattr, torch.Size, "count"), "it takes 'count'"),
        (Metadata({}, planner_data=Call(getattr, Metadata, "__init__")), "it takes '__init__'"),
        (Call(os.mkdir, "ran"), "it names posix.mkdir,"),
        (torch.load, "it names torch.serialization.load,"),
        (namedtuple, "it names collections.namedtuple,"),
    ],
)
def test_a_table_reaches_the_classes_of_dcps_tables_only(saved, content, sentence):
    """It runs nothing."""
    (saved / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match=f"could run code: {sentence}"):
        storage.load_checkpoint(state(), saved, no_dist=True)
    assert not os.path.exists("ran")
    (saved / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(InputError, match="cannot be read"):
        storage.read_table(saved)


def flip(path, offset=-1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_processes_share_the_files_that_they_verify(saved):
    def problems() -> int:
        return sum(storage.verify(saved, (rank, 2)) is not None for rank in (0, 1))

    assert problems() == 0
    flip(saved / "__0_0.distcp")
    assert problems() == 1
    # The hash is right, yet the program that wrote the table cannot read it.
    (saved / ".metadata").write_bytes(pickle.dumps(Call(os.mkdir, "ran")))
    manifest.write_manifest(saved, ["__0_0.distcp", ".metadata"], TRAINED_WITH)
    assert "it names posix.mkdir" in storage.verify(saved) and problems() == 1
    manifest.write_manifest(saved, ["__0_0.distcp"], TRAINED_WITH)
    assert "does not list .metadata" in storage.verify(saved)


def other(path, target) -> None:
    path.unlink()
    path.symlink_to(target) if target else os.mkfifo(path)


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (lambda f: flip(f / "__0_0.distcp", 3000), "__0_0.distcp has other content"),
        (lambda f: os.truncate(f / "__0_0.distcp", 100), "__0_0.distcp has other bytes"),
        (lambda f: os.truncate(f / "manifest.json", 40), "manifest.json is corrupt"),
        (
            lambda f: (f / "manifest.json").write_text('{"files": {"a": 3}, "trained_with": {}}'),
            "manifest.json is corrupt",
        ),
        (lambda f: other(f / "manifest.json", ""), "manifest.json is corrupt (not a regular file"),
        (
            lambda f: other(f / ".metadata", "/dev/zero"),
            ".metadata cannot be read (not a regular file",
        ),
    ],
)
def test_corruption_is_named(saved, corrupt, sentence):
    corrupt(saved)
    assert sentence in storage.verify(saved)


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_a_file_that_cannot_be_read_is_not_corrupt(saved, name):
    """Its disk may be away: of ENOENT, EIO and ESTALE none tells what the file holds."""
    (saved / name).rename(saved / "away")
    for reason in ("No such file", "Input/output"):
        with pytest.raises(
            manifest.UnreadableError, match=f"step-4/{name} cannot be read .{reason}"
        ):
            storage.verify(saved)
        if reason == "No such file":
            (saved / name).symlink_to("/proc/self/mem")  # a regular file that gives EIO
    (saved / name).unlink()
    (saved / "away").rename(saved / name)
    assert storage.verify(saved) is None


def test_an_entry_with_a_payload_runs_nothing(tmp_path):
    save(tmp_path / "step-1", state() | {"betas": Call(os.mkdir, str(tmp_path / "ran"))})
    with pytest.raises(InputError, match="the entry betas is not a plain value.*posix.mkdir"):
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
        patch.setattr(manifest, "write_atomic", killed)
        with pytest.raises(BaseException, match="killed"):
            save(tmp_path / "step-4", state())
    assert os.listdir(tmp_path) == ["step-4.saving"]
    assert manifest.checkpoint_steps(tmp_path) == []
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
    assert manifest.checkpoint_steps(tmp_path) == [2, 7, 8, 10]  # the disk of 7 may be away
    assert storage.remove_left_behind(tmp_path) == ["step-1.deleting", "step-3.saving"]
    kept = {*theirs, "step-2", "step-10", "step-5.saving", "step-6", "step-7", "step-8"}
    assert set(os.listdir(tmp_path)) == kept | {"step-9.saving"}
    assert manifest.checkpoint_steps(tmp_path / "none") == []


def test_removed_and_set_aside(saved):
    first = storage.set_aside(saved)
    save(saved, state())
    assert [first.name, storage.set_aside(saved).name] == ["step-4.corrupt", "step-4.corrupt-2"]
    save(saved, state())
    storage.remove_checkpoint(saved)
    assert sorted(os.listdir(saved.parent)) == ["step-4.corrupt", "step-4.corrupt-2"]
