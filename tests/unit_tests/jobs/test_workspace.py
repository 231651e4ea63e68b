"""The folder of jobs: one command at a time."""

import pytest

from tests.helpers.sentences import refused
from titan_tts.jobs.workspace import working_in


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
