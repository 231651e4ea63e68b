"""What a run's saves and loads exchange, what they survive, and what state they leave the run in."""

import pytest
import torch.distributed as dist

from tests.helpers.tiny_runs import Folder, killed
from titan_tts import cli


@pytest.mark.long
def test_a_process_alone_exchanges_nothing_to_save_and_to_load(train, monkeypatch):
    """gloo's threads would copy it by OpenMP teams of their own, and every later step be slower."""
    for name in ("gather_object", "all_gather_object", "scatter_object_list"):
        monkeypatch.setattr(dist, name, lambda *_, **__: pytest.fail("objects were exchanged"))
    for steps, mode in ((3, "disabled"), (4, "async")):
        assert train("run", f"--training.steps={steps}", f"--checkpoint.async_mode={mode}") == 0


@pytest.mark.long
def test_a_checkpoint_whose_disk_is_away_stops_the_run_and_stays(tmp_path, train, capsys):
    """It is no corrupt one: neither is it renamed nor trained from the one before."""
    assert train("run", "--training.steps=4") == 0
    run = Folder(tmp_path / "run")
    path, disk, state = run.path / "checkpoint/step-4", tmp_path / "disk", run.state()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(disk)
    assert train("run", "--training.steps=6") == 2
    error = capsys.readouterr().err
    assert f"{run.path}/checkpoint/step-4/" in error and "mount its disk" in error
    assert run.checkpoints() == {"step-2", "step-4"} and run.state() == state
    assert cli.main(["checkpoint", "verify", str(run.path)]) == 1
    verified = capsys.readouterr().out
    assert "step-4/" in verified and "cannot be read" in verified and "step-2: valid" in verified
    (tmp_path / "elsewhere").rename(disk)
    assert train("run", "--training.steps=6") == 0
    assert list(run.losses()) == [1, 2, 3, 4, 5, 6] and "step-6" in run.checkpoints()


@pytest.mark.long
def test_a_save_in_the_background_counts_once_it_is_complete(tmp_path, train, after_step):
    """Also one that is complete only after the run has failed."""
    found = []
    steps = {4: lambda trainer: found.append(trainer.run_folder.saved_step), 5: killed}
    after_step(steps)
    with pytest.raises(RuntimeError, match="killed"):
        train("run", "--training.steps=6", "--checkpoint.async_mode=async")
    run = Folder(tmp_path / "run")
    state = run.state()
    assert found == [None]  # nothing has waited for the save of step 2 yet
    assert (state["state"], state["error"]) == ("failed", "killed")
    assert state["saved_step"] == 4 and run.checkpoints() == {"step-2", "step-4"}
