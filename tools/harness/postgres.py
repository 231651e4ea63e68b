"""A PostgreSQL server in a temporary folder, run by an ordinary user and reached by a socket alone."""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.harness.runs import wait_until


def programs() -> Path | None:
    """The folder of Debian's server, which is on no PATH, or of another."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    other = shutil.which("postgres")
    path = found[-1] if found else Path(other).resolve() if other else None
    return path.parent if path else None


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


def _answers(url: str) -> bool:
    import psycopg

    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@contextmanager
def postgres_server(folder_of_programs: Path) -> Iterator[str]:
    """Its URL."""
    # Not below a folder of pytest, where other users may not go; and short, as a socket's path must be.
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        user: dict[str, Any] = {}
        if os.getuid() == 0:  # it refuses root
            shutil.chown(folder, "nobody", "nogroup")
            user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        data = f"{folder}/data"
        initdb = [folder_of_programs / "initdb", "--auth=trust", "--username=tests", "--no-sync"]
        options = {"stdout": subprocess.DEVNULL, "cwd": folder, **user}
        subprocess.run([*initdb, "-D", data], check=True, **options)
        command = [folder_of_programs / "postgres", "-D", data, "-k", folder, "-F"]
        with open(f"{folder}/log", "wb") as log:
            options |= {"stdout": log, "stderr": log, "preexec_fn": _end_with_parent}
            server = subprocess.Popen([*command, "-c", "listen_addresses="], **options)
        url = f"postgresql://tests@/postgres?host={folder}"
        try:
            wait_until(lambda: _answers(url) or server.poll() is not None, 60)
            assert server.poll() is None, Path(folder, "log").read_text()
            yield url
        finally:
            server.send_signal(signal.SIGQUIT)
            server.wait(30)
