import pytest

from tests.helpers.pretrained_checkpoints import WRITERS


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Tiny encoders with their tokenizers, by name; tests change copies."""
    folder = tmp_path_factory.mktemp("encoders")
    return {name: write(folder / name) for name, write in WRITERS.items()}
