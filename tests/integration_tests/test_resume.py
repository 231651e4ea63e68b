"""A run killed with SIGKILL and resumed elsewhere trains as if nothing had happened."""

import json

from tests import kill_resume, runs
from tests.synthetic import make_shards


def test_killed_and_resumed_run_equals_the_unbroken_one(tmp_path):
    make_shards(tmp_path / "data", 40, seed=5)
    kill_resume.make_seed_checkpoint(tmp_path)
    unbroken = runs.run(tmp_path, "unbroken", kill_resume.common_arguments(tmp_path))
    ids = unbroken.audited_ids(ranks=1)
    assert sorted(ids) == list(range(1, kill_resume.STEPS + 1))
    assert all(names and ":" in names[0] for names in ids.values())

    outcome = kill_resume.kill_and_resume(tmp_path, "killed", unbroken, seed=1)
    assert outcome.same_ids
    assert outcome.largest_loss_difference < 1e-5
    assert outcome.largest_weight_difference < 1e-4
    assert len(outcome.kills) == len(kill_resume.LIVES) - 1
    state = json.loads((tmp_path / "killed" / "state.json").read_text())
    assert (state["state"], state["step"]) == ("completed", kill_resume.STEPS)

    # Going on from an older checkpoint in the same folder would overwrite the newer ones.
    arguments = kill_resume.common_arguments(tmp_path)
    older = runs.start(tmp_path, "killed", [*arguments, "--checkpoint.load_step=12"])
    assert older.wait() == 2
    assert "load_step = 12" in older.log.read_text() and "Traceback" not in older.log.read_text()

    # What a kill left of a save is removed, and a finished run that is started again stays as it is.
    unfinished = tmp_path / "killed" / "checkpoint" / "step-99"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    before = (tmp_path / "killed" / "metrics.jsonl").read_bytes()
    again = runs.run(tmp_path, "killed", arguments)
    assert not unfinished.exists()
    assert (again.folder / "metrics.jsonl").read_bytes() == before
