"""A training process and its launcher: rank variables, the first line, the launcher's end."""

import argparse
import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from torchtitan.models.dit_tts.errors import require, show, without_secrets

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
        if name != "MASTER_ADDR":
            launcher_number(name)
    _require(bool(os.environ.get("MASTER_ADDR")), "MASTER_ADDR", "a host")
    ranks = launcher_number("WORLD_SIZE")
    _require(launcher_number("RANK") < ranks, "RANK", f"less than {ranks}, WORLD_SIZE")


def _require(holds: bool, name: str, kind: str) -> None:
    require(
        holds,
        f"the environment variable {name} is {os.environ.get(name) or 'not set'}, but a launcher sets it to {kind}; "
        f"start by titan-tts train --nproc or torchrun, or unset RANK, LOCAL_RANK and WORLD_SIZE for one process",
    )


def die_with_parent() -> None:
    """Has the kernel send SIGTERM to this process when its parent dies, even of SIGKILL (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def say_start(args: Sequence[str], folder: Path | None = None) -> None:
    """Prints what is started, before the imports that take seconds.

    Args:
        args: of torchrun or of one training process.
        folder: the run folder, where it is known already.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    names = ("--job.config_file", "--job.config-file")
    parser.add_argument(*names, dest="config", nargs="?", default="the default config")
    parser.add_argument("--nproc_per_node", nargs="?", default="1")
    parser.add_argument("--nnodes", nargs="?", default="1")
    given, _ = parser.parse_known_args(args)
    count = f"{given.nproc_per_node} process{'es' if given.nproc_per_node != '1' else ''}"
    machines = f" on each of {given.nnodes} machines" if given.nnodes != "1" else ""
    where = f"; run folder: {folder}" if folder else ""
    line = f"titan-tts train: {given.config}, {count}{machines}, starting{where}"
    show(without_secrets(line))
