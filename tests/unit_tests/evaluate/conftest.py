"""A run to sample from and its shards."""

import pytest

from tests.helpers import sampled_run


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    return sampled_run.write_numbered_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def loaded(tmp_path, shards):
    return sampled_run.make_run(tmp_path, shards)
