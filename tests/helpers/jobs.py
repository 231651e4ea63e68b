"""Jobs for the runner: each leaves a line for every attempt, and ends as its name says."""

import os
import signal
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.errors import InputError


def do(folder: str, name: str, device: str) -> dict[str, Any]:
    """ "killed", "input", "error" and "disk" fail; with "once" in the name the second attempt succeeds."""
    tried = Path(folder, name)
    with tried.open("a") as file:
        file.write(f"{os.getpid()} {device}\n")
    if "once" not in name or len(tried.read_text().splitlines()) == 1:
        if "killed" in name:
            os.kill(os.getpid(), signal.SIGKILL)
        if "input" in name:
            raise InputError(f"{name} is wrong")
        if "error" in name:
            raise RuntimeError(f"CUDA error{name.partition('error')[2]}")
        if "disk" in name:
            raise OSError(28, "No space left on device", "/full")
    return {"name": name, "pid": os.getpid()}
