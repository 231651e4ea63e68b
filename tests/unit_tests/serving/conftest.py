"""A synthesizer that is served."""

import pytest

from tests.helpers import sampled_run, served


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    return sampled_run.write_numbered_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def synthesizer(tmp_path, shards):
    return served.make_synthesizer(tmp_path, shards)
