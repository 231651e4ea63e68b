"""How a grid is continued, shared by two commands, and kept apart from what is no run of it."""

import os
import signal
import time

import pytest
from filelock import FileLock

from tests.helpers.instant_runs import AXES, InstantRun, order, start, states
from titan_tts.grids import grid_run
from titan_tts.launch.supervisor import Outcome, interrupt_on_signals
from torchtitan.models.dit_tts.errors import InputError

pytestmark = pytest.mark.usefixtures("no_training")


def test_a_grid_that_was_ended_continues(tmp_path, monkeypatch):
    """The run that it was at is run again; what was done before is not. tests/integration_tests kill a grid."""
    run, waits = start(tmp_path), []

    def interrupted(self, seconds, until):
        waits.append((seconds, until()))
        if len(waits) == 3:
            raise KeyboardInterrupt
        return True

    with monkeypatch.context() as context:
        context.setattr(InstantRun, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.run("")
    assert waits == [(20 * 60, True)] * 3
    found = [run.record(cell).get("state") for cell in run.all]
    assert found == ["completed", "completed", "preempted", None, None, None]
    assert start(tmp_path).run("") == 0
    names = [cell.name for cell in run.all]
    assert order(tmp_path) == [*names[:3], *names[2:]]
    assert set(states(run).values()) == {"completed"}


def test_sigterm_interrupts_a_grid():
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        interrupt_on_signals()
        for each in before:
            with pytest.raises(KeyboardInterrupt, match=each.name):
                os.kill(os.getpid(), each)
                time.sleep(5)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_two_commands_share_a_grid(tmp_path, capsys):
    one, other = start(tmp_path), start(tmp_path)
    with one._lock(one.all[0]):
        assert other.run("") == 0
    said = capsys.readouterr().out
    assert "3 completed, 3 waiting\n3 runs are in progress in another command, or remain\n" in said
    assert {cell.axes["layout"] for cell in other.all if other.record(cell)} == {"fsdp"}
    assert one.run("") == 0 and len(order(tmp_path)) == 6


@pytest.mark.long
def test_runs_of_another_grid_are_not_taken_for_this_ones(tmp_path):
    """Nor runs with a corrupt record; nothing is removed."""
    run = start(tmp_path)
    run.run("")
    with pytest.raises(InputError, match="or to other settings"):
        start(tmp_path, AXES + "[settings]\noptimizer.lr = 0.5").run("")
    (run.all[0].folder / "run.json").write_text('{"form')
    with pytest.raises(InputError, match="belongs to another run"):
        start(tmp_path).run("")
    assert (run.all[0].folder / "benchmark.json").exists()


@pytest.mark.long
def test_an_interrupted_run_is_made_anew_once_its_process_has_ended(tmp_path, monkeypatch):
    """Its record stays while the folder is emptied, should this start be killed, too."""
    run = start(tmp_path)
    run.run("")
    folder = run.all[0].folder
    run.keep(run.all[0], Outcome("running", "", 0.0), None)
    monkeypatch.setattr(grid_run.GridRun, "lock_seconds", 0.1)
    with FileLock(folder / "run.lock"):
        with pytest.raises(InputError, match="still runs in it"):
            start(tmp_path).run("")
    assert (folder / "benchmark.json").exists()

    def killed(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(run, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            run.run("")
    assert {path.name for path in folder.iterdir()} == {"run.json", "run.lock"}
    assert start(tmp_path).run("") == 0 and (folder / "benchmark.json").exists()


def test_a_folder_that_is_no_run_of_a_grid_is_left_alone(tmp_path):
    """But for what a start killed in its first write leaves."""
    run = start(tmp_path)
    file = run.all[0].folder / "state.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(InputError, match="belongs to another run"):
        run.run("")
    assert file.read_text() == "{}"
    file.rename(file.with_name(".run.json.0123.tmp"))
    assert run.run("") == 0
