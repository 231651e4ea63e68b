"""The console command for scripts, without the seconds that its imports take.

A server imports the product once and forks a process for each command that a script gives; the script's
`titan-tts` hands it arguments, folder, environment and files, and waits for the exit status.
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tools.harness import forked

# Commands that a command starts by Python's name are the server's, too.
_PYTHON = """#!/bin/sh
[ "$1 $2" = "-m titan_tts" ] && shift 2 && exec {program} "$@"
exec {python} "$@"
"""
_CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect({address!r})
socket.send_fds(server, [b"files"], [0, 1, 2])
command = [sys.argv[1:], os.getcwd(), dict(os.environ)]
server.sendall(json.dumps(command).encode() + b"\\n")
status = server.recv(1)
sys.exit(status[0] if status else 137)
"""


@contextlib.contextmanager
def titan_tts(folder: Path, **variables: str) -> Iterator[Path]:
    """The program `titan-tts`, in `folder`, for as long as the context lasts.

    Args:
        variables: of the environment in which the product is imported.
    """
    address = str(folder / "commands")  # a socket's path has at most 107 bytes
    program = folder / "titan-tts"
    program.write_text(_CLIENT.format(python=sys.executable, address=address))
    python = folder / "python"
    python.write_text(_PYTHON.format(python=sys.executable, program=program))
    for file in (program, python):
        file.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.documents.commands", address, str(python)],
        cwd=forked.ROOT,
        env=forked.environment(PYTHONPATH=str(forked.ROOT), **variables),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield program
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _serve(address: str, python: str) -> None:
    for name in forked.IMPORTED:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            if os.fork() == 0:  # whose parent ends at once: the server has no children to wait for
                listener.close()
                sys.executable = python
                _run(client)
            os._exit(0)
        client.close()
        os.wait()


def _run(client: socket.socket) -> None:
    """Runs the client's command in this process, which ends with it or with the client."""
    _, files, _, _ = socket.recv_fds(client, 5, 3)
    arguments, folder, variables = json.loads(client.makefile().readline())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # What Python opened at the server's start knows of the server's own files whether they can seek.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    ended = threading.Event()

    def end_with_the_client() -> None:
        if client.recv(1) == b"" and not ended.is_set():
            os._exit(1)

    threading.Thread(target=end_with_the_client, daemon=True).start()
    import titan_tts

    sys.argv = ["titan-tts", *arguments]
    status = 1
    try:
        titan_tts.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ended.set()
    client.sendall(bytes([status & 255]))
    os._exit(status)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
