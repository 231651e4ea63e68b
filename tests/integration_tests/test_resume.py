"""A run killed with SIGKILL and resumed elsewhere trains as if nothing had happened."""

import json
import os
import platform
import signal

import numpy as np
import pytest

from tests.helpers.tars import npy, write_tar
from tools.harness import kill_resume, runs


def kill_one(folder, data, launched=(), ends=("SIGKILL",)):
    """A run ended in three of its four lives, beside an unbroken one."""
    kill_resume.make_seed_checkpoint(folder, data)
    unbroken = runs.run(folder, "unbroken", kill_resume.common_arguments(folder, data))
    ids = unbroken.audited_ids(ranks=1)
    assert sorted(ids) == list(range(1, kill_resume.STEPS + 1))
    assert all(names and ":" in names[0] for names in ids.values())

    outcome = kill_resume.kill_and_resume(folder, data, "killed", unbroken, 1, launched, ends)
    assert outcome.same_ids
    assert outcome.largest_loss_difference < 1e-5
    assert outcome.largest_weight_difference < 1e-4
    assert len(outcome.kills) == len(kill_resume.LIVES) - 1
    return outcome


@pytest.mark.slow
def test_mixed_balanced_corrupt_and_remote_data(tmp_path):
    with kill_resume.everything_at_once(tmp_path) as data:
        outcome = kill_one(tmp_path, data)
        assert outcome.replaced > 0


def test_signals_corrupt_checkpoints_and_bad_batches_cost_no_step(tmp_path):
    """A NaN and a spike, from samples whose values are valid numbers and out of all proportion, are skipped alike by
    all ranks. The life on two ranks is ended by its launcher; of the forked ones a single rank gets the signal."""
    with kill_resume.plain_data(tmp_path, samples=120) as data:
        for name, value in (("nan", 1e30), ("spike", 6e4)):
            latents = np.ones((40, 128), np.float32)
            latents[3] = value
            members = {"npy": npy(latents), "ref.npy": npy(latents[:8])}
            members["json"] = json.dumps({"text": name, "target_duration": 1.6}).encode()
            write_tar(
                tmp_path / "data" / f"{name}.tar",
                [(f"bad.{suffix}", content) for suffix, content in members.items()],
            )
        outcome = kill_one(tmp_path, data, launched=[1], ends=["SIGTERM", "SIGUSR1", "corrupt"])
    assert outcome.replaced == 0
    assert set(outcome.ended_by) == {"SIGTERM", "SIGUSR1", "corrupt"}
    state = json.loads((tmp_path / "killed" / "state.json").read_text())
    assert (state["state"], state["step"]) == ("completed", kill_resume.STEPS)
    reports = [
        json.loads(path.read_text())
        for path in (tmp_path / "killed" / "divergence").glob("*/report.json")
    ]
    worst = {report["samples"][0]["id"]: report["loss"] for report in reports}
    assert set(worst) == {"nan:bad", "spike:bad"}
    assert worst["nan:bad"] in ("nan", "inf") and worst["spike:bad"] > 1e5


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named(tmp_path):
    with kill_resume.plain_data(tmp_path) as data:
        arguments = [*runs.TINY, *data, "--training.local_batch_size=4", "--training.steps=999"]
        limits = ["--comm.init_timeout_seconds=12", "--comm.train_timeout_seconds=6"]
        run = runs.start(tmp_path, "run", [*arguments, *limits], processes=2)
        try:
            kill_resume.wait_for_step(run, 3)
            os.kill(run.processes[1].pid, signal.SIGSTOP)
            assert run.processes[0].wait(60) not in (0, None)
        finally:
            run.kill()
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["state"] == "timeout"
    assert f"rank 1 (host {platform.node()}) stalls at step" in state["error"]
    ranks = json.loads((tmp_path / "run" / "ranks.json").read_text())
    assert [each["pid"] for each in ranks] == [process.pid for process in run.processes]
    log = run.log.read_text()
    assert f"error: {state['error']}\n" in log and "Traceback" not in log
    assert all(f"rank {each['rank']}: host {each['host']}" in log for each in ranks)
