"""Jobs in this process, in processes and on Ray: what fails or is killed costs itself alone, a bounded number of times."""

import os
from collections import Counter

import pytest

from tests.helpers.sentences import refused
from titan_tts.jobs import engines
from titan_tts.jobs.engines import open_engine
from titan_tts.jobs.run import Job, progress, run_jobs

FUNCTION = "tests.helpers.jobs:do"


def run(runner, folder, *names, failed=None, tried=0, attempts=3):
    """{name: result} of the jobs that came to one, in the order in which they did."""
    folder.mkdir(exist_ok=True)
    jobs = [Job(name, (str(folder), name), tried=tried) for name in names]
    with progress("testing", "job", jobs) as bar:
        done = run_jobs(runner, FUNCTION, jobs, bar, folder, failed, attempts)
        found = {job.name: result for job, result in done}
        assert bar.n == (len(jobs) if failed else len(found))
    return found


def attempts_of(folder) -> dict[str, int]:
    return {path.name: len(path.read_text().splitlines()) for path in folder.iterdir()}


def check(runner, tmp_path, kills: bool = True) -> None:
    """All that an engine promises; `kills`: also what would kill this process."""
    noted = []

    def failed(job, reason):
        noted.append((job.name, job.tried, reason))

    good = ["a", "b", "c", "d"]
    bad = ["error once", "input", *(["killed once", "killed"] if kills else [])]
    found = run(runner, tmp_path / "all", *bad[:1], "a", *bad[1:], "b", "c", "d", failed=failed)
    assert found.keys() == {*good, *(name for name in bad if "once" in name)}
    assert all(result["name"] == name for name, result in found.items())
    expected = dict.fromkeys(good, 1) | {name: 2 if "once" in name else 3 for name in bad}
    assert attempts_of(tmp_path / "all") == expected
    times = Counter(name for name, *_ in noted)
    assert times == {name: 1 if "once" in name else 3 for name in bad}
    assert [number for name, number, _ in noted if name == "input"] == [1, 2, 3]
    reasons = {name: reason for name, _, reason in noted}
    assert reasons["input"] == "input is wrong"
    assert reasons["error once"] == "RuntimeError: CUDA error once"
    # What was tried before has fewer attempts left, and the bounds hold without `failed`, too.
    run(runner, tmp_path / "again", "input", "a", failed=failed, tried=1, attempts=2)
    assert attempts_of(tmp_path / "again") == {"input": 1, "a": 1}
    refused(lambda: run(runner, tmp_path / "input", "input"), "input is wrong")
    refused(
        lambda: run(runner, tmp_path / "disk", "disk"), "/full: No space left", "finished work is"
    )


def test_in_this_process(tmp_path):
    with open_engine("local", 1, ["cpu"]) as runner:
        check(runner, tmp_path, kills=False)

        def alike(failed):
            names = "1 error", "2 error", "a", "3 error"
            return run(runner, tmp_path / "x", *names, failed=failed)

        assert "a" in alike(lambda *_: None)  # something was done
        words = "each job fails alike (RuntimeError: CUDA error)"
        names = ["a error", "b error", "error 2", *(f"{number} error" for number in range(5))]
        refused(lambda: run(runner, tmp_path / "y", *names, failed=lambda *_: None), words)
        assert attempts_of(tmp_path / "y") == dict.fromkeys(names[:6], 1)


def test_in_processes_that_are_replaced(tmp_path):
    with open_engine("local", 1, ["cpu", "cuda:7"]) as runner:
        check(runner, tmp_path)
        lines = (tmp_path / "all/error once").read_text().splitlines()
        assert len({line.split()[0] for line in lines}) == 2  # its process is not used again
        devices = {path.read_text().split()[1] for path in (tmp_path / "all").iterdir()}
        assert devices == {"cpu", "cuda:7"}
        sentence = "killed failed 2 times", "ended by SIGKILL", "fewer --workers", "work is kept"
        refused(lambda: run(runner, tmp_path / "k", "killed", attempts=2), *sentence)
    before = {*tmp_path.iterdir()}
    with open_engine("local", 1, ["cpu"], here=False) as runner:
        found = run(runner, tmp_path / "own", "killed once")
        assert found and {*tmp_path.iterdir()} - before == {tmp_path / "own"}


def test_processes_that_never_begin_end_the_command(tmp_path, monkeypatch):
    real, starts = engines._Process.__init__, []

    def ends_at_once(process, device, threads):
        real(process, device, threads)
        process._process.kill()
        starts.append(device)

    monkeypatch.setattr(engines._Process, "__init__", ends_at_once)
    with open_engine("local", 2, ["cpu"]) as runner:
        words = "before they have a job", "ended by SIGKILL"
        refused(lambda: run(runner, tmp_path, "a", "b", "c"), *words)
    assert len(starts) <= 6


@pytest.mark.slow
def test_on_ray(tmp_path):
    with open_engine("ray", 2, ["cpu"]) as runner:
        check(runner, tmp_path)


def test_an_interrupted_command_leaves_no_process(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_engine("local", 2, ["cpu"]) as runner:
        for number, _ in runner(FUNCTION, [(str(tmp_path), "a")]):
            pid = int((tmp_path / "a").read_text().split()[0])
            raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):  # its parent has waited for it
        os.kill(pid, 0)
