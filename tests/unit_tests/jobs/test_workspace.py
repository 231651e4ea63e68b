"""The folder of jobs: one command at a time, and a journal that a kill cannot spoil."""

import pytest

from tests.helpers.sentences import refused
from titan_tts.jobs.workspace import Journal, working_in


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

    with pytest.raises(BrokenPipeError), work():
        raise BrokenPipeError  # of who reads what is printed: the folder is not at fault
    refused(full, "out: cannot be written (/full: No space left", "finished work is kept")


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
