"""How a grid is run, listed and planned, with runs that end at once."""

import json
import re
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.instant_runs import order, start, states
from titan_tts.cli import main
from titan_tts.grids import grid_run
from titan_tts.grids.grid_file import read_grid
from titan_tts.grids.grid_run import GridRun
from titan_tts.launch import supervisor
from titan_tts.launch.supervisor import Outcome, RunProcess
from titan_tts.plan.forecast import largest_that_fits

pytestmark = pytest.mark.usefixtures("no_training")


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "mine").rglob("*") if path.is_file()}


def test_all_runs_are_run_once(tmp_path, capsys):
    run = start(tmp_path)
    assert sum("waiting    no forecast" in line for line in run.list()) == 6
    assert not (tmp_path / "mine").exists()  # the list starts nothing
    assert run.run("the grid") == 0
    assert order(tmp_path) == [cell.name for cell in run.all]
    assert set(states(run).values()) == {"completed"}
    record = json.loads((run.all[2].folder / "run.json").read_text())
    assert record["factors"]["batch"] == 4
    assert record["grid"] == "mine" and record["seconds"] > 0 and record["forecast"] is None
    assert (tmp_path / "mine" / "grid.toml").read_text() == "the grid"
    said = capsys.readouterr().out
    assert "6 runs, of which 0 are done" in said and "[6/6]" in said and "8.00 samples/s" in said
    assert "6 completed" in said
    assert sum("completed  no forecast" in line for line in run.list()) == 6
    before = files_of(tmp_path)
    assert start(tmp_path).run("the grid") == 0 and files_of(tmp_path) == before
    assert "6 runs, of which 6 are done" in capsys.readouterr().out


def test_larger_batches_are_skipped_after_an_oom_in_every_repeat(tmp_path):
    """Each layout for itself: ddp with a batch of 1, fsdp with one of 4."""
    axes = '[axes]\n"layout, debug.seed" = [["ddp", 5], ["fsdp", 2]]\nbatch = [1, 2, 4]'
    run = start(tmp_path, axes, "repeats = 2")
    assert run.run("") == 0
    assert [run.record(cell)["state"] for cell in run.all] == [
        *("oom", "skipped", "skipped", "completed", "completed", "oom"),
        *("skipped", "skipped", "skipped", "completed", "completed", "skipped"),
    ]
    assert run.record(run.all[-1])["reason"] == "a batch of 4 ran out of memory"


def test_a_run_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(grid_run, "RunProcess", RunProcess)
    monkeypatch.setattr(grid_run, "train_command", lambda *_, **__: ["sleep", "100"])
    run = start(tmp_path, "", "timeout_minutes = 0.01")
    assert run.run("") == 1
    record = run.record(run.all[0])
    assert record["state"] == "timeout" and "not completed in 0.01 minutes" in record["reason"]


def test_failures_and_refusals_do_not_end_a_grid(tmp_path, capsys):
    extra = '[[extra]]\n"debug.seed" = 3\n[[extra]]\ncompile = "reduce-overhead"'
    run = start(tmp_path, '[axes]\nlayout = ["ddp"]\nbatch = [1, 2]\n' + extra)
    assert run.run("") == 1
    assert sorted(states(run).values()) == ["completed", "completed", "failed", "skipped"]
    (refused,) = [cell for cell in run.all if cell.refused]
    assert "CUDA graphs" in run.record(refused)["reason"]
    assert "1 failed, 1 skipped" in capsys.readouterr().out
    again = start(tmp_path, '[axes]\nlayout = ["ddp"]\nbatch = [1, 2]\n' + extra, "", ["failed"])
    assert again.run("") == 1 and len(order(tmp_path)) == 4


def test_what_ablate_passes_on(tmp_path, monkeypatch, capsys, no_training):
    monkeypatch.setattr(supervisor, "interrupt_on_signals", lambda: None)
    path = tmp_path / "mine.toml"
    start(tmp_path, '[axes]\n"debug.seed" = [3, 2]\nbatch = [1, 4]')
    command = ["ablate", str(path), "--no-analysis"]
    assert main(command) == 1 and len(no_training) == 4
    assert not (tmp_path / "mine/analysis").exists()
    assert main([*command, "--retry", "oom,failed"]) == 1 and len(no_training) == 4 + 3
    assert main([*command, "--retry", "oom,running"]) == 2
    assert "--retry oom,running, but allowed are completed, oom," in capsys.readouterr().err
    dry = [*command, "--dry-run", "--retry", "oom", "--gpu", "H100"]
    assert main(dry) == 0 and len(no_training) == 4 + 3
    said = capsys.readouterr().out
    assert "mine, planned for H100\n" in said and "by the plan: 0 runs" in said
    assert main(["ablate", str(path)]) == 1
    assert (tmp_path / "mine/analysis/summary.csv").exists()
    path.write_text(path.read_text().replace(str(tmp_path), "/proc"))
    assert main(command) == 2
    assert "[grid] dump_folder = /proc/mine/grid.toml cannot be" in capsys.readouterr().err


def test_what_the_plan_knows_not_to_fit_is_not_tried(tmp_path, monkeypatch):
    forecast = {"gpu": "A100", "fits": False, "gib": 90.0, "samples_per_second": 3.0, "mfu": 0.4}
    monkeypatch.setattr(grid_run.Forecaster, "forecast", lambda self, cell: forecast)
    run = start(tmp_path)
    assert any("DOES NOT FIT" in line for line in run.list())
    assert run.run("") == 0
    assert set(states(run).values()) == {"skipped"}
    record = run.record(run.all[0])
    assert record["reason"].startswith("plan: it needs 90.0 GiB") and record["forecast"] == forecast
    tried = GridRun(read_grid(tmp_path / "mine.toml"), {"skipped"}, run_what_cannot_fit=True)
    assert tried.run("") == 0 and set(states(tried).values()) == {"completed"}


def test_several_nodes_need_a_job_that_has_them(tmp_path, monkeypatch, no_training):
    text = '[axes]\ngpus = [2, 4, 6]\nlayout = ["fsdp"]\nbatch = [1]'
    run = start(tmp_path, text, "gpus_per_node = 4")
    assert run.run("") == 0
    two, four, six = (run.record(cell) for cell in run.all)
    assert (two["state"], four["state"]) == ("completed", "completed")
    assert six["reason"] == "6 GPUs are no whole number of nodes of 4"
    run = start(tmp_path, text, 'gpus_per_node = 2\nname = "nodes"')
    assert run.run("") == 0
    assert "it needs 2 nodes" in run.record(run.all[1])["reason"]
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    again = start(tmp_path, text, 'gpus_per_node = 2\nname = "nodes"', ["skipped"])
    assert again.run("") == 0
    command = no_training[-1]
    assert command.startswith("srun --nodes 2 --ntasks 2 ")
    assert " --nproc 2 " in command and f"train {again.all[1].folder}/config.toml" in command
    found = {cell.gpus: again.record(cell) for cell in again.all}
    assert found[4]["state"] == "completed" and found[4]["factors"]["nodes"] == 2
    assert "it needs 3 nodes" in found[6]["reason"]


def test_the_list_comes_as_it_is_planned_and_ends_with_totals(tmp_path, monkeypatch):
    planned = []

    def forecast(self, cell):
        planned.append(cell)
        if cell.refused or cell.batch == 32:
            return None
        speed = cell.batch + (cell.axes["layout"] == "ddp") / 2
        figures = {"gib": 1.0, "samples_per_second": speed, "mfu": 0.4, "seconds_per_step": 6.0}
        return {"fits": cell.batch < 16, **figures, "gpu": "H100"}

    monkeypatch.setattr(grid_run.Forecaster, "forecast", forecast)
    axes = '[axes]\nsize = ["one_gpu", "debug"]\nlayout = ["ddp", "fsdp"]\nbatch = [1, 8, 16, 32]\n'
    run = start(tmp_path, axes + '[[extra]]\nlayout = "3x2"\nbatch = 8\n', "steps = 35")
    lines = run.list()
    assert next(lines) == f"17 runs in {tmp_path}/mine" and not planned
    assert run.all[0].name in next(lines) and len(planned) == 1
    *_, fast, other, waiting = lines
    assert re.match(r"fastest 60M on 2 GPUs: dit_\w+_bs8_.*_p2x1", fast)
    assert re.match(r"fastest debug on 2 GPUs: dit_\w+_bs8_.*_p2x1", other)
    # Batches 1 and 8 of 4 layouts: 35 steps of 6 s after 90 s.
    assert "by the plan: 8 runs, 0.7 hours, 1.3 GPU hours, with 90 s" in waiting
    run.keep(run.all[0], Outcome("completed", "", 900.0), None)
    *_, waiting = run.list()
    assert "by the plan: 7 runs, 0.6 hours, 1.2 GPU hours" in waiting


def test_the_largest_batch_is_searched(tmp_path, monkeypatch):
    """Two ranks with 2·n > 4 out of memory; the repeats share the trials. One that fails does not end the grid."""
    forecast = lambda self, cell: {"fits": True, "of": cell.batch} if cell.batch else None  # noqa: E731
    monkeypatch.setattr(grid_run.Forecaster, "forecast", forecast)
    axes = '[axes]\nbatch = ["auto"]\n[settings]\ndebug.seed = '
    run = start(tmp_path, f"{axes}2", "repeats = 2")
    assert run.run("") == 0
    records = [run.record(cell) for cell in run.all]
    found = [(each["factors"]["batch"], each["repeat"], each["name"][-3:]) for each in records]
    assert found == [(2, 0, "_r0"), (2, 1, "_r1")]
    assert {record["state"] for record in records} == {"completed"}
    assert [record["forecast"]["of"] for record in records] == [2, 2]
    trials = {path.name for path in (tmp_path / "mine" / "trials").glob("*/bs*")}
    assert trials == {f"bs{n}" for n in (8, 7, 5, 1, 3, 2)}
    assert start(tmp_path, f"{axes}2", "repeats = 2").run("") == 0
    seeds = '[axes]\n"debug.seed" = [3, 5, 7]\nbatch = ["auto"]'
    other = start(tmp_path, seeds, 'name = "other"')
    assert other.run("") == 1
    failed, none, longer = (other.record(cell) for cell in other.all)
    assert failed["state"] == "failed" and "the trial of batch 8" in failed["reason"]
    assert none["state"] == "skipped" and none["reason"] == "not even a batch of 1 fits"
    assert (longer["state"], longer["factors"]["batch"]) == ("completed", 34)  # 40, 38, 36


@pytest.mark.parametrize("limit", [1, 2, 7, 33])
def test_the_search_finds_what_a_linear_search_finds(limit):
    for largest, guess in product(range(limit + 1), range(-1, limit + 3)):
        tried = []

        def fits(n, largest=largest, tried=tried):
            assert 1 <= n <= limit and n not in tried
            tried.append(n)
            return n <= largest

        assert largest_that_fits(fits, guess, limit) == largest
        assert guess != largest or len(tried) <= 2  # a good guess takes few trials
    tried = []
    assert largest_that_fits(lambda n: not tried.append(n), 8) == 4096
    assert len(tried) < 30  # steps double
