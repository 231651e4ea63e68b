"""Fixtures of several tests: synthetic shards, and a store to read from."""

import pytest

from tests.helpers.loaders import CHANNELS
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.data import remote


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"), 120, seed=7, channels=CHANNELS)


@pytest.fixture
def fast_and_direct(monkeypatch):
    """Retries wait milliseconds, and no proxy of the machine comes between."""
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(remote, "WAIT_FACTOR", 1.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
