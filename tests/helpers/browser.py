"""A headless browser for pages that must work offline."""

import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _start(page: Path, profile: Path, *options: str) -> str:
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is installed")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    # No name resolves: what the page would load from elsewhere stays missing.
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", *options, page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dom_after_scripts(page: Path, profile: Path) -> str:
    """The page's HTML once its scripts have run.

    Args:
        profile: an empty folder for the browser's files.
    """
    return _start(page, profile, "--dump-dom")


def screenshot(page: Path, profile: Path, picture: Path, width: int, height: int) -> None:
    """The top of the page as a PNG file."""
    size = f"--window-size={width},{height}"
    _start(page, profile, "--hide-scrollbars", size, f"--screenshot={picture}")
