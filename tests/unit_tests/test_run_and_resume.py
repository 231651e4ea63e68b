"""A training run in this process, and its resume from a checkpoint."""

import errno
import os
import re
import shutil
import signal
import tomllib

import pytest
import torch
from torchtitan.distributed import utils

from tests.helpers.tiny_runs import Folder
from titan_tts import cli
from tools.harness.synthetic import flip_bits
from torchtitan.models.dit_tts.run.checkpoint_storage import CheckpointWriter
from torchtitan.models.dit_tts.run.manifest import read_manifest


@torch.no_grad()
def move_average(trainer) -> None:
    """Far from the weights and from each other, so that nothing takes one for the other."""
    for distance, average in enumerate(trainer.ema.averages.values(), 1):
        for value in average.values():
            value.add_(10.0 * distance)


def run_out(trainer) -> None:
    raise RuntimeError("CUDA error: out of memory\nand a second line")


@pytest.mark.long
def test_a_killed_run_ends_as_the_unbroken_one(tmp_path, train, after_step, monkeypatch, capsys):
    unbroken, killed = Folder(tmp_path / "unbroken"), Folder(tmp_path / "killed")
    steps = {3: move_average}
    after_step(steps)
    given = "--training.steps=6", "--model.text_positions=aligned", "--data.max_caption_tokens=12"
    assert train("unbroken", *given) == 0
    steps[5] = run_out
    assert train("killed", *given) == 1
    assert "error: CUDA error: out of memory\n" in capsys.readouterr().err
    state = killed.state()
    assert (state["state"], state["step"]) == ("oom", 5)
    assert state["error"] == "CUDA error: out of memory"
    assert list(killed.losses()) == [1, 2, 3, 4, 5] and killed.checkpoints() == {"step-2", "step-4"}
    before = killed.metrics()[:4]

    del steps[5]
    limits = []
    monkeypatch.setattr(utils, "set_pg_timeouts", lambda limit, dims: limits.append(limit.seconds))
    assert train("killed", *given, "--comm.train_timeout_seconds=77") == 0
    assert limits == [77]  # after its first step, as in a run from the beginning
    assert (killed.state()["state"], killed.state()["step"]) == ("completed", 6)
    assert killed.losses() == unbroken.losses() and len(killed.losses()) == 6
    assert killed.metrics()[:4] == before  # these steps were not trained again
    assert killed.audit() == unbroken.audit()
    samples = [len(row["ids"]) for row in killed.audit()]
    assert set(samples) == {8, 16}  # the shorter of the two buckets has twice as many
    assert [row["lr"] for row in killed.metrics()] == [row["lr"] for row in unbroken.metrics()]
    found, expected = killed.checkpoint(6), unbroken.checkpoint(6)
    assert found["ema"].pop("num_updates") == expected["ema"].pop("num_updates") == 6
    for entry, average in expected["ema"].items():
        name = re.sub(r"^decay-0\.\d+\.", "", entry)
        assert torch.equal(found["ema"][entry], average), name
        assert torch.equal(found[name], expected[name]), name
        assert (average - expected[name]).abs().min() > 0.01, name


@pytest.mark.long
def test_a_start_that_would_overwrite_another_changes_nothing(tmp_path, train, caplog):
    """From an older checkpoint, without any, or with another optimizer, in the folder of a run."""
    folder = Folder(tmp_path / "run")
    caplog.set_level("INFO")
    assert train("run", "--training.steps=4") == 0
    assert "from step 1 to 4 on 1 x " in caplog.text and "sequence length" not in caplog.text

    def kept() -> tuple:
        return (folder.path / "metrics.jsonl").read_bytes(), folder.audit(), folder.checkpoints()

    before = kept()
    for refused in (
        "--checkpoint.load_step=2",
        "--checkpoint.no-enable",
        "--checkpoint.load_only",
        "--optimizer.name=Muon",
    ):
        assert train("run", "--training.steps=6", refused) == 2
        assert kept() == before and folder.state()["state"] == "completed"
    assert tomllib.loads((folder.path / "config.toml").read_text())["training"]["steps"] == 4
    # Once more as it was: it is at its end.
    caplog.clear()
    assert train("run", "--training.steps=4") == 0
    assert kept() == before and folder.state()["state"] == "completed"
    assert "The run is complete: step 4 of 4" in caplog.text


@pytest.mark.long
def test_only_a_valid_checkpoint_is_loaded_and_only_our_own_leftovers_are_removed(
    tmp_path, train, caplog, capsys
):
    run = Folder(tmp_path / "run")
    assert train("run", "--training.steps=6") == 0
    losses = run.losses()
    checkpoints = run.path / "checkpoint"
    theirs = {"step-4-export", "step-best-notes", "step-2-keep", "notes"}
    for name in theirs:
        (checkpoints / name).mkdir()
    (checkpoints / "step-7.tar").write_bytes(b"")
    for half in ("step-8.saving", "step-0.deleting"):
        (checkpoints / half).mkdir()
    os.truncate(checkpoints / "step-6" / ".metadata", 100)
    assert train("run", "--training.steps=6") == 0
    assert run.losses() == losses and run.checkpoints() == {
        *theirs,
        *("step-2", "step-4", "step-6", "step-6.corrupt", "step-7.tar"),
    }
    assert "step-6/.metadata has other bytes" in caplog.text

    capsys.readouterr()
    assert cli.main(["checkpoint", "verify", str(run.path)]) == 0
    assert capsys.readouterr().out.count(": valid") == 3
    for corrupt, step in enumerate((2, 4, 6), 1):
        data = checkpoints / f"step-{step}" / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-1] + b"?")
        assert cli.main(["checkpoint", "verify", str(run.path)]) == 1
        out = capsys.readouterr().out
        assert out.count("has other content than manifest.json says") == corrupt
    assert train("run", "--training.steps=8") == 2
    assert "has no valid checkpoint left" in capsys.readouterr().err and run.losses() == losses
    for step in (2, 4, 6):  # nor where they are gone
        (checkpoints / f"step-{step}.corrupt").rename(tmp_path / str(step))
    assert train("run", "--training.steps=8") == 2
    assert "the run had saved step 6" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT"])
def test_a_signal_ends_the_run_after_a_step_that_is_saved(
    tmp_path, train, after_step, capsys, name
):
    number = signal.Signals[name]
    steps = {3: lambda trainer: os.kill(os.getpid(), number)}
    after_step(steps)
    before = {each: signal.getsignal(each) for each in signal.Signals if each < 32}
    assert train("run", "--training.steps=6") == 128 + number
    assert {each: signal.getsignal(each) for each in signal.Signals if each < 32} == before
    run = Folder(tmp_path / "run")
    state = run.state()
    kind = "interrupted" if name == "SIGINT" else "preempted"
    assert (state["state"], state["step"], state["saved_step"]) == (kind, 3, 3)
    assert run.checkpoints() == {"step-2", "step-3"} and list(run.losses()) == [1, 2, 3]
    assert f"{name}: the run has ended after step 3" in capsys.readouterr().err
    if name == "SIGUSR1":
        steps.clear()
        assert train("run", "--training.steps=6") == 0
        assert train("unbroken", "--training.steps=6") == 0
        unbroken = Folder(tmp_path / "unbroken")
        assert run.losses() == unbroken.losses() and run.audit() == unbroken.audit()


@pytest.mark.long
def test_ranks_compare_commands_and_what_the_run_has_saved(tmp_path, train, monkeypatch):
    """Machines with a run folder each would wait for each other in different collectives."""
    given = []
    to = "torchtitan.models.dit_tts.trainer.assert_equal_across_ranks"
    monkeypatch.setattr(to, lambda *each: given.append(each))
    for steps, saved in ((4, []), (5, [2, 4])):
        assert train("run", f"--training.steps={steps}", "--optimizer.lr=0.003") == 0
        parts, what = given.pop()
        assert parts["list of saved steps"] == saved and parts["optimizer.lr"] == 0.003
        assert what == f"command and run folder {tmp_path / 'run'}" and not given


@pytest.mark.long
def test_a_full_disk_ends_in_a_sentence_and_leaves_the_last_save(
    tmp_path, train, after_step, capsys, monkeypatch
):
    write = CheckpointWriter.write_data

    def no_space(writer, plan, planner):
        if writer.final_path.name == "step-6":
            write(writer, plan, planner)
            raise failures.pop()
        return write(writer, plan, planner)

    failures = [OSError(errno.ENOSPC, "No space left on device")]
    failures += [RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 7 vs 5")]
    monkeypatch.setattr(CheckpointWriter, "write_data", no_space)
    for mode in ("disabled", "async"):
        run = Folder(tmp_path / mode)
        assert train(mode, "--training.steps=8", f"--checkpoint.async_mode={mode}") == 2
        error = capsys.readouterr().err
        assert "checkpoint: step 6 could not be saved (no space is left on the disk; w" in error
        assert "free some and give the same command again, which continues from step 4" in error
        assert run.checkpoints() == {"step-2", "step-4"} and run.state()["state"] == "failed"


@pytest.mark.long
def test_a_change_of_what_is_trained_is_refused_or_allowed_by_its_key(tmp_path, train, capsys):
    run = Folder(tmp_path / "run")
    assert train("run", "--training.steps=2") == 0
    assert train("run", "--training.steps=4", "--ema.no-enable") == 2
    assert "--resume.allow ema.enable" in capsys.readouterr().err
    assert list(run.losses()) == [1, 2] and run.state()["state"] == "completed"
    initial = f"--checkpoint.initial_load_path={run.path}/checkpoint/step-2"
    (tmp_path / "other/checkpoint/step-9.saving").mkdir(parents=True)  # hides no initial weights
    assert train("other", "--training.steps=2", initial, "--objective.prediction=noise") == 2
    complete = "--checkpoint.no-initial_load_model_only"
    assert train("other", "--training.steps=4", initial, complete, "--optimizer.name=Muon") == 2
    assert "does not fit this config (Missing key" in capsys.readouterr().err
    assert train("other", "--training.steps=1", initial, "--optimizer.lr=1e-5") == 0

    assert train("run", "--training.steps=1") == 2
    assert "[training] steps = 1, but" in capsys.readouterr().err
    off = ["--ema.no-enable", "--resume.allow=ema.enable"]
    assert train("run", "--training.steps=4", *off) == 0
    assert "ema" not in run.checkpoint(4)
    assert train("run", "--training.steps=6", "--resume.allow=ema.enable") == 0
    assert run.checkpoint(6)["ema"]["num_updates"] == 2
    noise = ["--objective.prediction=noise", "--resume.allow=objective.prediction"]
    assert train("run", "--training.steps=8", *noise) == 0
    for step, prediction in ((6, "velocity"), (8, "noise")):
        manifest = read_manifest(run.path / f"checkpoint/step-{step}")
        assert manifest["trained_with"]["objective.prediction"] == prediction


@pytest.mark.long
def test_epochs_set_the_steps_and_replaced_samples_are_counted(tmp_path, train, tiny_data):
    copied = shutil.copytree(tiny_data, tmp_path / "corrupt")
    flip_bits(copied / "000000.tar", [0, 3, 6, 9])  # latents of four samples
    given = ["--data.on_error=skip", "--data.max_corrupt_fraction=1", f"--data.path={copied}"]
    assert train("run", "--data.epochs=2", "--metrics.log_freq=2", *given) == 0
    folder = Folder(tmp_path / "run")
    steps = tomllib.loads((folder.path / "config.toml").read_text())["training"]["steps"]
    assert folder.state()["step"] == steps == len(folder.audit())
    # In two epochs, less what does not fill a batch.
    assert 4 <= sum(row["replaced_samples"] for row in folder.metrics()) <= 8


@pytest.mark.long
def test_a_benchmark_that_is_stopped_leaves_no_report(tmp_path, train, after_step):
    """Figures of some of its steps would be taken for those of all."""
    after_step({6: lambda trainer: os.kill(os.getpid(), signal.SIGUSR1)})
    benchmark = ["--benchmark.enable", "--benchmark.steps=9", "--benchmark.warmup_steps=1"]
    assert train("bench", *benchmark) == 128 + signal.SIGUSR1
    assert Folder(tmp_path / "bench").state()["state"] == "preempted"
    assert not (tmp_path / "bench" / "benchmark.json").exists()
