"""A folder that cannot be listed, also by root, whom rights do not bind."""

import errno
import os
from pathlib import Path

import pytest


def lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its path; `os.walk` does not come into it from here on."""
    scandir, locked = os.scandir, str(folder)

    def refuse(path):
        if path == locked:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    return locked
