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
