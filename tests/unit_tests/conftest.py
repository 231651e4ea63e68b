"""What every unit test gets: one thread, and a cache folder of its own; and fixtures for some."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.tiny_runs import (  # noqa: F401
    after_step,
    bad_batches,
    skip_from_the_start,
    tiny_data,
    train,
)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tests are small: threads cost more than they save, and machines are shared."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Nothing is read from or left in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine, in a fresh current folder."""
    from huggingface_hub import HfFileSystem, constants

    from titan_tts.speak.open_run import find_folder
    from tools.harness.hub_server import HubServer

    monkeypatch.chdir(tmp_path)
    with HubServer(token="secret") as server:
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        find_folder.cache_clear()
        yield server
        find_folder.cache_clear()
        HfFileSystem.clear_instance_cache()


@pytest.fixture
def one_process_group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
