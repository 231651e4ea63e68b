"""A headless browser: for pages that must work offline, and driven by the DevTools protocol over pipes."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Session:
    """One page."""

    def __init__(self, to: int, of: int):
        self._to, self._of, self._rest = os.fdopen(to, "wb", 0), os.fdopen(of, "rb", 0), b""
        self._number, self._session = 0, ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 90) -> Any:
        """The value of an expression, once it is true."""
        until = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"{script}: {self.run('document.body.innerText')}"
            time.sleep(0.2)
        return value

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            found, ended, rest = self._rest.partition(b"\0")
            if not ended:
                more = self._of.read(1 << 20)
                assert more, "the browser has ended"
                self._rest += more
                continue
            self._rest = rest
            answer = json.loads(found)
            if answer.get("id") == self._number:
                assert "result" in answer, answer
                return answer["result"]


def _command(profile: Path, hosts: str, *options: str) -> list[str]:
    """The browser's command; the test is skipped where there is none.

    Args:
        profile: an empty folder for its files.
        hosts: names that resolve; what a page would load from elsewhere stays missing.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    return [*command, f"--host-resolver-rules=MAP * ~NOTFOUND{hosts}", *options]


def dom_after_scripts(page: Path, profile: Path) -> str:
    """The page's HTML once its scripts have run.

    Args:
        profile: an empty folder for the browser's files.
    """
    command = _command(profile, "", "--dump-dom", page.absolute().as_uri())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def browse(profile: Path) -> Iterator[Session]:
    """A page of a browser without a screen; only this machine can be reached. The test is skipped where
    there is no browser.

    Args:
        profile: an empty folder for its files.
    """
    command = _command(profile, ", EXCLUDE 127.0.0.1", "--remote-debugging-pipe", "about:blank")
    read_there, to = os.pipe()
    of, write_there = os.pipe()

    def as_3_and_4() -> None:
        kept = os.dup(read_there), os.dup(write_there)
        os.dup2(kept[0], 3)
        os.dup2(kept[1], 4)

    process = subprocess.Popen(
        command, preexec_fn=as_3_and_4, close_fds=False, stderr=subprocess.DEVNULL
    )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Session(to, of)
    finally:
        process.kill()
        process.wait()
