"""A PostgreSQL server in a temporary folder, for an ordinary user, reached by a socket alone. `postgres` is a fixture:
its URL."""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tools.harness.runs import wait_until


def _programs() -> Path | None:
    """The folder of Debian's server, which is on no PATH, or of another."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    other = shutil.which("postgres")
    path = found[-1] if found else Path(other).resolve() if other else None
    return path.parent if path else None


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    programs = _programs()
    if programs is None:
        pytest.skip("postgres is not installed (Debian: apt-get install postgresql)")
    # Not below pytest's own folder, where other users may not go; and short, as a socket's path must be.
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        user: dict = {}
        if os.getuid() == 0:  # it refuses root
            shutil.chown(folder, "nobody", "nogroup")
            user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        data = f"{folder}/data"
        make = [programs / "initdb", "--auth=trust", "--username=tests", "--no-sync", "-D", data]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, cwd=folder, **user)
        command = [programs / "postgres", "-D", data, "-k", folder, "-F", "-c", "listen_addresses="]
        with open(f"{folder}/log", "wb") as log:
            server = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, preexec_fn=_end_with_parent, **user
            )
        url = f"postgresql://tests@/postgres?host={folder}"
        try:
            wait_until(lambda: _answers(url) or server.poll() is not None, 60)
            assert server.poll() is None, Path(folder, "log").read_text()
            yield url
        finally:
            server.send_signal(signal.SIGQUIT)
            server.wait(30)
