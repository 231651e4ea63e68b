"""A run to export."""

import shutil

import pytest

from tests.helpers.exported_run import CONDITIONED


@pytest.fixture
def trained(train, tmp_path, tmp_path_factory):
    """Two steps, with aligned texts, averages and conditioning tokens, and a checkpoint of each."""
    kept = tmp_path_factory.getbasetemp() / "trained-for-export"
    if not kept.exists():
        assert train("run", "--training.steps=2", "--checkpoint.interval=1", *CONDITIONED) == 0
        shutil.copytree(tmp_path / "run", kept)
    return shutil.copytree(kept, tmp_path / "run", dirs_exist_ok=True)
