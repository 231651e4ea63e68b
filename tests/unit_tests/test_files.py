"""Atomic writes and files of JSON lines."""

import hashlib
import os
from pathlib import Path

import pytest

from tests.helpers.collected import write_collected
from titan_tts.export.exporter import new_folder
from torchtitan.models.dit_tts import files
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import JsonLines, file_name, fingerprint, unique, write_atomic


def files_below(folder) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch, at):
    path = tmp_path / "a" / "state.json"
    write_atomic(path, b"older \xff")
    write_atomic(path, "old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, at, full)
    with pytest.raises(OSError, match=f"No space .*: '{path}'$"):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert files_below(tmp_path) == ["a/state.json"]


def write_folder(path):
    with new_folder(path / "out") as folder:
        for name in ("a", "below/b"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("x")


def test_of_two_writers_of_a_folder_the_first_one_wins(tmp_path):
    with (
        pytest.raises(InputError, match="/out was written meanwhile"),
        new_folder(tmp_path / "out"),
    ):
        write_folder(tmp_path)
    assert files_below(tmp_path) == ["out/a", "out/below/b"] and os.listdir(tmp_path) == ["out"]


WRITERS = {
    "a file": lambda path: write_atomic(path / "state.json", "x"),
    "a recording": lambda path: write_collected(path / "c", [0.5, 0.7]),
    "an exported folder": write_folder,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_renamed_is_on_the_disk_before_and_its_name_after(tmp_path, monkeypatch, writer):
    """The suite's own fsync does nothing."""
    synced, renamed = [], []
    monkeypatch.setattr(os, "fsync", lambda n: synced.append(os.readlink(f"/proc/self/fd/{n}")))

    def noted(call):
        def rename(source, target):
            parts = [source, *(Path(source).rglob("*") if os.path.isdir(source) else ())]
            renamed.append((len(synced), {*map(str, parts)}, os.path.dirname(target)))
            return call(source, target)

        return rename

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    WRITERS[writer](tmp_path)
    assert renamed
    for count, parts, folder in renamed:
        assert parts <= {*synced[:count]} and folder in synced[count:]


def rows(*steps: int) -> list[dict]:
    return [{"step": step, "loss": 1.5 * step, "ids": [f"ü{step}"]} for step in steps]


@pytest.fixture
def lines(tmp_path) -> JsonLines:
    file = JsonLines(tmp_path / "audit" / "rank0.jsonl")
    assert file.read() == []
    for row in rows(1, 2, 3, 4):
        file.append(row)
    return file


@pytest.mark.parametrize("torn", [b'{"step": 5, "lo', b""])
@pytest.mark.parametrize("step", [0, 2, 9])
def test_keep_until(lines, step, torn):
    corrupt = b'{"loss": 1}\n[3]\n' + torn
    with open(lines.path, "ab") as file:
        file.write(corrupt)
    assert lines.read() == rows(1, 2, 3, 4)
    assert lines.keep_until(step) == 2 + (torn != b"")
    aside = lines.path.with_name("rank0.jsonl.corrupt").read_bytes()
    assert aside == corrupt.rstrip(b"\n") + b"\n"
    kept = rows(*range(1, min(step, 4) + 1))
    assert lines.read() == kept
    lines.append({"step": step + 1})  # after a torn line this must start a line of its own
    assert lines.read() == [*kept, {"step": step + 1}]


def test_a_fingerprint_is_the_same_on_every_machine():
    """Files are found again by it."""
    parts = b"\1" + bytes(7) + b"a" + b"\2" + bytes(7) + b"bc"
    assert fingerprint("a", b"bc") == hashlib.sha256(parts).hexdigest()[:16] != fingerprint("abc")


@pytest.mark.parametrize(
    "name, download, expected",
    [("a/b", True, [True, "hub", False]), ("./b", True, [True]), ("a/b", False, [True])],
)
def test_the_hub_is_asked_for_what_is_not_here(monkeypatch, name, download, expected):
    calls: list = []

    def load(local_files_only: bool):
        calls.append(local_files_only)
        raise OSError

    monkeypatch.setattr(files, "require_hub", lambda: calls.append("hub"))
    with pytest.raises(OSError):
        files.load_local_or_hub(load, name, download=download)
    assert calls == expected


def test_paths(monkeypatch):
    assert files.is_remote("s3://a") and not files.is_remote("file:///a") | files.is_remote("a:b")
    assert files.local_path("file:///a/../b%20c") == "/b c"
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.local_path("~/x") == "/home/me/x"
    assert files.user_cache_folder("x") == "/home/me/.cache/titan-tts/x"


def test_kernels_are_kept_where_that_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for home, kept in ((tmp_path / "file", None), (tmp_path, f"{tmp_path}/titan-tts/compile")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        files.keep_compiled_kernels()
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == kept
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    files.keep_compiled_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


def test_names_of_files():
    assert file_name("a/b c") == "a_b_c" and file_name("../x") == "_x"
    assert unique(["a", "A", "a", "b"]) == ["a", "A", "a-2", "b"]
    assert unique(["a", "A", "a", "b"], str.lower) == ["a", "A-2", "a-3", "b"]
    assert len(file_name("x" * 999)) == 120 and file_name("語" * 99) == "語" * 40
