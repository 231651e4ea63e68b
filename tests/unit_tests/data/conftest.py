"""Fixtures of tests that read from stores."""

import pytest

from torchtitan.models.dit_tts.data import remote


@pytest.fixture
def fast_and_direct(monkeypatch):
    """Retries wait milliseconds, and no proxy of the machine comes between."""
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(remote, "WAIT_FACTOR", 1.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
