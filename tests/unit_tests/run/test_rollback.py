"""A run that meets a bad step ends as one that never met its batch, or in a sentence."""

import math
import os
import signal

import pytest

from tests.helpers.small_models import assert_equal
from tests.helpers.tiny_runs import Folder, break_weights, killed


@pytest.mark.long
@pytest.mark.parametrize("log_freq, factor", [(1, math.nan), (7, 1e4)])
def test_a_run_with_bad_steps_equals_one_without_their_batches(
    tmp_path, train, bad_batches, skip_from_the_start, log_freq, factor, caplog
):
    """Also where the host learns of a bad step one step later, and where it is the last or a saved one."""
    arguments = ["--training.steps=9", f"--metrics.log_freq={log_freq}"]
    bad_batches.update({4: factor, 5: factor, 10: factor})
    assert train("run", *arguments) == 0
    run, expected = Folder(tmp_path / "run"), Folder(tmp_path / "expected")
    bad_batches.clear()
    skip_from_the_start([4, 5, 10])
    assert train("expected", *arguments) == 0
    assert run.audit() == expected.audit() and len(run.audit()) == 9
    for name in ("step", "loss"):
        assert [row[name] for row in run.metrics()] == [row[name] for row in expected.metrics()]
    assert run.metrics()[-1]["skipped_batches"] == 3
    assert_equal(run.tensors(9), expected.tensors(9))
    # Step N takes batch N - 1, and a later one after those that are skipped.
    folders = {path.name for path in (run.path / "divergence").iterdir()}
    assert folders == {"step-5-batch-4", "step-5-batch-5", "step-9-batch-10"}
    assert "the step is undone and its batch skipped" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("end, bad", [("signal", 3), ("kill", 2)])
def test_an_end_after_a_bad_step_changes_nothing(
    tmp_path, train, bad_batches, after_step, skip_from_the_start, end, bad
):
    """At a signal the checkpoint's position is before the batch that is to be skipped."""
    bad_batches[bad] = math.nan
    steps = {}
    after_step(steps)
    arguments = ["run", "--training.steps=6"]
    run, expected = Folder(tmp_path / "run"), Folder(tmp_path / "expected")
    if end == "signal":
        steps[3] = lambda trainer: (
            trainer.dataloader.skipped and os.kill(os.getpid(), signal.SIGUSR1)
        )
        assert train(*arguments) == 128 + signal.SIGUSR1
        assert run.state()["saved_step"] == 3
    else:
        for step in (3, 5):  # nothing after the bad step is saved yet; step 4 is
            steps.clear()
            steps[step] = lambda trainer: trainer.dataloader.skipped == {bad} and killed()
            with pytest.raises(RuntimeError, match="killed"):
                train(*arguments)
    steps.clear()
    bad_batches.clear()
    assert train(*arguments) == 0
    skip_from_the_start([bad])
    assert train("expected", "--training.steps=6") == 0
    assert run.losses() == expected.losses() and run.audit() == expected.audit()


@pytest.mark.long
@pytest.mark.parametrize("log_freq, excluded", [(100, ""), (1, "dataloader,optimizer")])
def test_broken_weights_are_replaced_by_the_last_checkpoints(
    tmp_path, train, after_step, skip_from_the_start, log_freq, excluded
):
    """As by a flipped bit in memory: every step is bad from then on, whatever its batch. What a start was
    not to load goes back with the rest: the run has saved it itself."""

    steps = {5: lambda trainer: (break_weights(trainer), steps.clear())}
    after_step(steps)
    arguments = ["--training.steps=9", f"--metrics.log_freq={log_freq}"]
    if excluded:
        arguments.append(f"--checkpoint.exclude_from_loading={excluded}")
    assert train("run", *arguments) == 0
    # Four bad steps are one too many: the run goes back to step 4 and skips what it had taken since.
    skip_from_the_start(range(4, 9))
    assert train("expected", *arguments) == 0
    run, expected = Folder(tmp_path / "run"), Folder(tmp_path / "expected")
    assert run.audit() == expected.audit() and len(run.audit()) == 9
    assert_equal(run.tensors(9), expected.tensors(9))


@pytest.mark.long
def test_bad_steps_before_a_rollback_do_not_count_after_it(
    tmp_path, train, bad_batches, skip_from_the_start
):
    """Nor those that the checkpoint remembers: the last one is undone alone."""
    bad_batches.update(dict.fromkeys((1, 2, 7, 9), math.nan))
    arguments = ["--training.steps=9", "--divergence.max_bad_steps=2"]
    assert train("run", *arguments) == 0
    skip_from_the_start([1, 2, 6, 7, 9])  # step 5 took batch 6 when 7 made it go back to step 4
    assert train("expected", *arguments) == 0
    run, expected = Folder(tmp_path / "run"), Folder(tmp_path / "expected")
    assert run.audit() == expected.audit() and len(run.audit()) == 9


@pytest.mark.long
def test_a_run_that_does_not_get_past_bad_steps_ends_in_a_sentence(
    tmp_path, train, bad_batches, capsys
):
    limits = ["--divergence.max_rollbacks=1", "--divergence.max_bad_steps=0"]
    arguments = ["--training.steps=9", *limits]
    bad_batches.update({2: math.nan, 6: math.nan})
    assert train("once_for_each_checkpoint", *arguments) == 0
    bad_batches.clear()
    bad_batches.update(dict.fromkeys(range(3, 9), math.nan))
    assert train("run", *arguments) == 2
    run = Folder(tmp_path / "run")
    stuck = "step 3: loss nan, gradient norm nan: too many bad steps, after 1 rollbacks to step 2"
    assert stuck in run.state()["error"]
    assert run.state()["state"] == "failed" and run.checkpoints() == {"step-2"}
    anew = ["--checkpoint.exclude_from_loading=dataloader", "--checkpoint.interval=5"]
    bad_batches.update(dict.fromkeys(range(9), math.nan))
    for name, start in (("run", anew), ("other", ["--divergence.max_rollbacks=0"])):
        assert train(name, "--training.steps=9", *start) == 2
        assert "no checkpoint of this start to roll back to" in capsys.readouterr().err
    bad_batches.clear()
    assert train("run", *arguments) == 0  # the checkpoint is intact
    assert list(run.losses()) == list(range(1, 10))


@pytest.mark.long
def test_another_curve_does_not_divide_by_the_old_ones_limits(tmp_path, train, bad_batches):
    """After a change that is allowed, or in a new run from a checkpoint, the loss has another level."""
    assert train("run", "--training.steps=40", "--checkpoint.interval=40") == 0
    bad_batches.update(dict.fromkeys(range(1000), 9.0))
    more = ["--training.steps=44", "--divergence.max_bad_steps=0"]
    initial = f"--checkpoint.initial_load_path={tmp_path}/run/checkpoint/step-40"
    assert train("other", *more, initial, "--checkpoint.no-initial_load_model_only") == 0
    assert train("run", *more) == 2
    lr = ["--optimizer.lr=0.011", "--resume.allow=optimizer.lr"]
    assert train("run", *more, *lr) == 0
