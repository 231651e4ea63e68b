"""How a grid is continued, shared by two commands, and kept apart from what is no run of it."""

import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock

from tests.helpers.instant_runs import AXES, DEBUG, ROOT, order, start, states
from titan_tts.grids import runner
from titan_tts.grids.grid_file import read_grid
from titan_tts.grids.grid_run import GridRun
from titan_tts.launch.supervisor import Outcome
from torchtitan.models.dit_tts.errors import InputError

pytestmark = pytest.mark.usefixtures("no_training")

CHILD = """
import json, sys, time
time.sleep(0.7)
folder = sys.argv[1]
report = {"samples_per_second": 2.0, "mfu": None, "peak_reserved_gib": 1.0}
json.dump(report, open(folder + "/benchmark.json", "w"))
open(folder + "/../order.txt", "a").write(folder.rsplit("/")[-1] + "\\n")
json.dump({"state": "completed", "time": time.time(), "error": ""}, open(folder + "/state.json", "w"))
"""

GRID = """
# A shell starts what is in its background with SIGINT ignored.
import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
import sys; sys.path.insert(0, sys.argv[1])
from titan_tts.overlay import install_overlay; install_overlay()
from titan_tts.grids import runner
runner.train_command = lambda config, *_, **__: [sys.executable, "-c", sys.argv[3], str(config.parent)]
from titan_tts.cli import main; sys.exit(main(["ablate", sys.argv[2]]))
"""


@pytest.mark.long
def test_a_grid_that_was_ended_continues(tmp_path):
    """The run that it was at is run again; what was done before is not. tests/integration_tests kill a grid."""
    start(tmp_path, AXES)  # writes the file
    command = [sys.executable, "-c", GRID, str(ROOT), str(tmp_path / "mine.toml"), CHILD]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    while "[2/6]" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.3)  # in the third run
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0
    run = start(tmp_path, AXES)
    records = {cell.name: run.runner.record(cell).get("state") for cell in run.all}
    (stopped,) = [name for name, state in records.items() if state == "preempted"]
    done = order(tmp_path)
    assert run.run("") == 0
    assert set(states(run).values()) == {"completed"}
    left = order(tmp_path)[len(done) :]
    assert not set(done[:2]) & set(left) and stopped in left


def test_two_commands_share_a_grid(tmp_path, capsys):
    one, other = start(tmp_path), start(tmp_path)
    with one._group_lock(one.all[0]) as mine:
        assert mine
        assert other.run("") == 0
    said = capsys.readouterr().out
    assert "3 completed, 3 waiting\n3 runs are in progress in another command, or remain\n" in said
    assert {cell.axes["layout"] for cell in other.all if other.runner.record(cell)} == {"fsdp"}
    assert one.run("") == 0 and len(order(tmp_path)) == 6


@pytest.mark.long
def test_runs_of_another_grid_are_not_taken_for_this_ones(tmp_path):
    """Nor runs of another base config or with a corrupt record; nothing is removed."""
    run = start(tmp_path)
    run.run("")
    with pytest.raises(InputError, match="or to other settings"):
        start(tmp_path, AXES + "[settings]\noptimizer.lr = 0.5").run("")
    with pytest.raises(InputError, match="to other settings"):
        start(tmp_path, options="memory_gib = 1.0").run("")
    other = tmp_path / "other.toml"
    other.write_text(DEBUG.read_text().replace("n_layers = 2", "n_layers = 1"))
    file = tmp_path / "mine.toml"
    start(tmp_path)
    file.write_text(file.read_text().replace(str(DEBUG), str(other)))
    with pytest.raises(InputError, match="or to other settings"):
        GridRun(read_grid(file), set()).run("")
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
    run.runner.keep(run.all[0], Outcome("running", "", 0.0), None)
    monkeypatch.setattr(runner.Runner, "lock_seconds", 0.1)
    with FileLock(folder / "run.lock"):
        with pytest.raises(InputError, match="still runs in it"):
            start(tmp_path).run("")
    assert (folder / "benchmark.json").exists()

    def killed(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(run.runner, "keep", killed)
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
