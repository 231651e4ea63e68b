"""Grids whose runs end at once."""

import pytest

from tests.helpers.instant_runs import InstantRun, train
from titan_tts.grids import grid_run


@pytest.fixture
def no_training(monkeypatch):
    """Returns the command of each run."""
    given = []

    def run(command, folder, log):
        given.append(" ".join(command))
        assert log == folder / "run.log"
        return InstantRun(train, folder)

    monkeypatch.setattr(grid_run, "RunProcess", run)
    return given
