"""`postgres`, a fixture: the URL of a server that runs until the tests end."""

from collections.abc import Iterator

import pytest

from tools.harness.postgres import postgres_server, programs


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    folder = programs()
    if folder is None:
        pytest.skip("postgres is not installed (Debian: apt-get install postgresql)")
    with postgres_server(folder) as url:
        yield url
