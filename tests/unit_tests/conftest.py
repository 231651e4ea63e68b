"""What every unit test gets: one thread, and a cache folder of its own."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tests are small: threads cost more than they save, and machines are shared."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Nothing is read from or left in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
