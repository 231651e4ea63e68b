"""The folder of jobs: one command at a time, one rule, and a journal that a kill cannot spoil."""

import pytest

from tests.helpers.sentences import refused
from titan_tts.jobs.workspace import Journal, require_same, sweep, working_in


def test_one_command_at_a_time(tmp_path):
    out, lock = tmp_path / "deep/out", tmp_path / "deep/.out.lock"

    def work():
        return working_in(out, lock, "knit", "OUT")

    with work() as folder:
        assert folder == out and folder.is_dir()
        refused(lambda: work().__enter__(), "another titan-tts knit is running", "OUT")
    assert not out.exists() and not lock.exists()  # nothing was made
    with pytest.raises(KeyError), work():
        (out / "kept").touch()
        raise KeyError
    assert (out / "kept").exists() and not lock.exists()

    def full():
        with work():
            raise OSError(28, "No space left on device", "/full")

    refused(full, "out: cannot be written (/full: No space left", "finished work is kept")


def test_other_settings_are_named(tmp_path):
    old = {"a": 1, "deep": {"b": "x", "c": None}}
    require_same(tmp_path, old, {"a": 1, "b": "x"}, "do that")
    new = {"a": 2, "deep": {"b": "y"}, "d": True}
    words = "other settings (a was 1, is 2; b was 'x', is 'y'; d was None, is True); do that"
    refused(lambda: require_same(tmp_path, old, new, "do that"), str(tmp_path), words)


def test_a_journal_survives_a_kill(tmp_path):
    path = tmp_path / "jobs.jsonl"
    journal = Journal(path)
    assert journal.rows() == {}
    journal.note("a", reason="dark\n", tried=1)
    journal.note("b\u2028ü", seconds=0.5)
    journal.note("a", tried=2)
    rows = {"a": {"tried": 2}, "b\u2028ü": {"seconds": 0.5}}
    assert journal.rows() == rows == Journal(path).rows()
    whole = path.read_bytes()
    for cut in range(1, 12):
        path.write_bytes(whole[:-cut])
        after = Journal(path)
        assert after.rows()["b\u2028ü"] == {"seconds": 0.5}
        after.note("c", x=1)
        assert Journal(path).rows()["c"] == {"x": 1} and len(Journal(path).rows()) == 3
    path.write_bytes(whole)
    journal = Journal(path)
    journal.forget(["a", "never there"])
    assert journal.rows() == Journal(path).rows() == {"b\u2028ü": {"seconds": 0.5}}
    journal.note("a", tried=1)
    assert Journal(path).rows() == {"a": {"tried": 1}, "b\u2028ü": {"seconds": 0.5}}


def test_what_killed_writers_left_is_swept(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in (".a.tar.0f.tmp", "deep/.b.tmp", "deep/.c", "d.tmp"):
        (tmp_path / name).touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".c", "d.tmp", "deep"]
