"""A training process and its launcher: rank variables, the launcher's end."""

import ctypes
import os
import signal
import sys

from torchtitan.models.dit_tts.errors import require

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PR_SET_PDEATHSIG = 1


def launcher_number(name: str, default: str = "") -> int:
    """The value of a launcher's variable: a rank, a number of processes or a port."""
    value, least = os.environ.get(name, default), int(name.endswith("SIZE"))
    _require(value.isdecimal() and int(value) >= least, name, f"a whole number from {least}")
    return int(value)


def check_launcher() -> None:
    """Raises InputError unless RANK_VARIABLES hold the values that a launcher sets."""
    for name in RANK_VARIABLES:
        if name == "MASTER_ADDR":
            _require(bool(os.environ.get(name)), name, "a host")
        else:
            launcher_number(name)
    in_range = launcher_number("RANK") < launcher_number("WORLD_SIZE")
    _require(in_range, "RANK", "less than WORLD_SIZE")


def _require(holds: bool, name: str, kind: str) -> None:
    require(
        holds,
        f"the environment variable {name} is {os.environ.get(name) or 'not set'}, but a launcher sets it to {kind}; "
        f"start by titan-tts train --nproc or torchrun, or unset RANK, LOCAL_RANK and WORLD_SIZE for one process",
    )


def die_with_parent() -> None:
    """Has Linux send SIGTERM to this process when its parent dies, even of SIGKILL; does nothing on macOS."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
