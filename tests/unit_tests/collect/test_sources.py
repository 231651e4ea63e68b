"""What SOURCE names, and that contents are read once."""

import hashlib
import os
from pathlib import Path

import fsspec
import pytest

from tests.helpers.locked_folder import lock
from tests.helpers.sentences import refused
from titan_tts.collect import sources
from titan_tts.collect.sources import Source, list_source, local_copy, register, size_and_version
from torchtitan.models.dit_tts.data import remote

OUTPUT = Path("/no/output")
FILES = ["a.mp3", "B.WAV", "deep/er/c.m4b", "deep/d.flac"]


@pytest.fixture
def folder(tmp_path) -> Path:
    source = tmp_path / "source"
    for name in [*FILES, "notes.txt", ".hidden.wav", "deep/cover.jpg"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(f"content of {name}".encode())
    return source


@pytest.fixture
def output(output) -> Path:
    output.mkdir()
    return output


def names(source: object) -> list[str]:
    return [*list_source(str(source), OUTPUT).values()]


def registered(source: object, output: Path, prune: bool = False) -> dict[str, Source]:
    """By name."""
    return {each.name: each for each in register(str(source), output, prune).values()}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_a_folder_a_glob_a_list_and_a_file(folder, tmp_path, monkeypatch):
    assert names(folder) == sorted(FILES)
    assert names(folder / "deep/*") == ["cover.jpg", "d.flac"]  # who names it means it
    assert names(folder / "*/er/*.m4b") == ["deep/er/c.m4b"]
    assert names(folder / "**/*.[mf]*") == ["a.mp3", "deep/d.flac", "deep/er/c.m4b"]
    assert names(folder / "a.mp3") == ["a.mp3"]
    monkeypatch.chdir(folder)
    assert names("deep") == ["d.flac", "er/c.m4b"]
    listed = tmp_path / "list.txt"
    listed.write_text(f"# mine\nsource/a.mp3\n\n{folder}/B.WAV\nsource/a.mp3\n")
    assert names(listed) == [f"{folder}/B.WAV", "source/a.mp3"]
    paths = [Path(each) for each in list_source(str(listed), OUTPUT)]
    assert paths == [folder / "B.WAV", folder / "a.mp3"]


def test_what_a_collection_is_made_of_is_no_recording(folder, tmp_path, monkeypatch, capsys):
    os.symlink(folder, tmp_path / "link")
    listed = tmp_path / "list.txt"
    listed.write_text("source/a.mp3\nlink/deep/d.flac\nsource/deep/d.flac\n")
    for source in (folder, folder / "*", tmp_path / "link", listed):
        left = list_source(str(source), folder / "deep").values()
        assert left and not any("deep" in name for name in left)
    inside = str(folder / "deep" / "d.flac")
    refused(lambda: list_source(inside, folder / "deep"), "contains no recordings")
    (folder / "deep" / "collect.json").touch()  # of another command
    assert names(folder) == ["B.WAV", "a.mp3"]
    assert names(folder / "deep" / "*.flac") == ["d.flac"]
    os.unlink(folder / "deep" / "collect.json")
    locked = lock(folder / "deep", monkeypatch)
    assert names(folder) == ["B.WAV", "a.mp3"]
    assert capsys.readouterr().out.startswith(f"{locked}: cannot be listed (Permission denied)")


def test_links_in_a_circle_and_lines_with_any_character(folder, tmp_path):
    for number in range(3):
        os.symlink(folder, folder / f"{number}")
        os.symlink(folder / "deep", folder / "deep" / f"{number}")
    assert names(folder) == sorted(FILES)
    (folder / "x\u2028y\x85.mp3").write_bytes(b"x")
    listed = tmp_path / "list.txt"
    listed.write_text("source/x\u2028y\x85.mp3\r\n", encoding="utf-8")
    assert names(listed) == ["source/x\u2028y\x85.mp3"]


def test_what_names_no_recording_is_one_sentence(folder, tmp_path):
    refused(lambda: names(tmp_path / "none"), "none contains no recordings")
    listed = tmp_path / "list.txt"
    listed.write_text("source/a.mp3\nsource/gone.mp3\n")
    refused(lambda: names(listed), "line 2", "source/gone.mp3")
    for url in ("github://a/b", "zip://x::y", "zip://source", "ftp://", "http://[::1"):
        listed.write_text(url)
        [line] = names(listed)
        refused(lambda: size_and_version(line))
    os.rename(folder / "a.mp3", os.fsencode(folder) + b"/\xff.mp3")
    refused(lambda: names(folder), "not UTF-8", "\\xff.mp3")


def test_a_bucket(tmp_path, output, monkeypatch):
    store = fsspec.filesystem("memory")
    for name in ("x/a.mp3", "x/y/b.wav", "x/notes.md"):
        store.pipe(f"/bucket/{name}", f"content of {name}".encode())
    assert names("memory://bucket/x/*.mp3") == ["a.mp3"]
    assert names("memory://bucket/x/y/b.wav") == ["b.wav"]
    with monkeypatch.context() as patch:  # a store may answer by what it listed before
        stale, find = ["/bucket/x/gone.mp3"], type(store).find
        patch.setattr(type(store), "invalidate_cache", lambda self: stale.clear())
        patch.setattr(type(store), "find", lambda self, path: stale or find(self, path))
        assert names("memory://bucket/x") == ["a.mp3", "y/b.wav"]
    found = registered("memory://bucket/x", output)["y/b.wav"]
    assert found.file == sha("content of x/y/b.wav")
    with local_copy(found, tmp_path / "copies") as path:
        assert Path(path).read_text() == "content of x/y/b.wav"
    assert not os.path.exists(path)
    with monkeypatch.context() as patch:
        patch.setattr(remote, "TRIES", 1)
        patch.setattr(type(store), "get_file", lambda self, name, path: 1 / 0)
        fetching = local_copy(found, tmp_path / "copies")
        refused(lambda: fetching.__enter__(), "b.wav: cannot be downloaded")


def test_a_recording_that_changes_while_it_is_read_is_refused(folder, output):
    reading = local_copy(registered(folder, output)["a.mp3"], output)
    assert reading.__enter__() == str(folder / "a.mp3")
    os.utime(folder / "a.mp3", ns=(1, 1))  # of the same size
    changed = "a.mp3: has changed since it was listed"
    refused(lambda: reading.__exit__(None, None, None), changed)


def test_a_content_is_read_once_for_each_size_and_time(folder, output, monkeypatch):
    read = []
    monkeypatch.setattr(sources, "READ_AHEAD_BYTES", 7)  # all contents are longer
    hashed = sources.content_id
    monkeypatch.setattr(sources, "content_id", lambda path: read.append(path) or hashed(path))
    first = registered(folder, output)
    assert {name: source.file for name, source in first.items()} == {
        name: sha(f"content of {name}") for name in FILES
    }
    assert len(read) == 4 and registered(folder, output) == first and len(read) == 4
    # The same length a moment later, and a copy of another, which is no job of its own.
    (folder / "a.mp3").write_bytes(b"CONTENT of a.mp3")
    os.utime(folder / "a.mp3", ns=(1, 1))
    (folder / "copy.flac").write_bytes(b"content of deep/d.flac")
    second = registered(folder, output)
    assert sorted(read[4:]) == [str(folder / "a.mp3"), str(folder / "copy.flac")]
    assert second["a.mp3"].file == sha("CONTENT of a.mp3")
    assert second.keys() == {*FILES, "copy.flac"} - {"deep/d.flac"}
    (folder / "copy.flac").unlink()
    (output / "files" / second["copy.flac"].file).mkdir(parents=True)
    assert registered(folder, output).keys() == {*FILES}
    del read[:]
    monkeypatch.setattr(sources, "size_and_version", lambda path: (os.path.getsize(path), 0))
    for count in (4, 8):  # where no time is known, each run reads all
        registered(folder, output)
        assert len(read) == count


def test_recordings_that_are_not_named_any_more_stay_if_they_are_complete(folder, output):
    found = registered(folder, output)
    (output / "files" / found["B.WAV"].file).mkdir(parents=True)
    assert registered(folder / "a.mp3", output).keys() == {"a.mp3", "B.WAV"}
    assert registered(folder / "a.mp3", output, prune=True).keys() == {"a.mp3"}
    assert registered(folder / "a.mp3", output).keys() == {"a.mp3"}


def test_what_is_known_of_a_path_survives_a_kill(folder, output, monkeypatch):
    (folder / "x\u2028ü.mp3").write_bytes(b"x")
    killed, hashed = [], sources.content_id

    def dies(path):
        if len(killed) == 2:
            raise KeyboardInterrupt
        killed.append(path)
        return hashed(path)

    monkeypatch.setattr(sources, "content_id", dies)
    with pytest.raises(KeyboardInterrupt):
        registered(folder, output)
    path = output / "sources.jsonl"
    whole = path.read_bytes()
    for cut in range(1, 12):  # the last line is torn, and the first one holds
        path.write_bytes(whole[:-cut])
        read = []
        monkeypatch.setattr(sources, "content_id", lambda path: read.append(path) or hashed(path))
        assert len(registered(folder, output)) == 5 and len(read) == 4
        assert registered(folder, output) and len(read) == 4
