"""Options of commands that do many jobs, and the folder in which they do them: a lock, and the state of the work."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import held, write_atomic


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Where jobs are done."""

    device: str = "auto"
    """Device of the models: auto, cpu, cuda, or a list such as cuda:0,cuda:1."""

    workers: int = 0
    """Processes; 0 chooses from work, cores and GPUs."""

    engine: Literal["local", "ray"] = "local"
    """Engine of the processes: this machine, or a Ray cluster whose nodes see all files under the same paths."""


@contextmanager
def working_in(folder: Path, lock: Path, command: str, option: str) -> Iterator[Path]:
    """The folder, made if absent, for this process alone; it is removed where it stays empty, without even the lock.

    Args:
        lock: a file, not in `folder` if that one may be renamed.
        command: that works there, for messages, as is `option`, which names the folder.

    An OSError in the context becomes an InputError.
    """
    refusal = f"{folder}: another titan-tts {command} is running there; wait for it, or give another {option}"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with held(lock, refusal):
            try:
                folder.mkdir(exist_ok=True)
                yield folder
            finally:
                with suppress(OSError):
                    folder.rmdir()
                lock.unlink(missing_ok=True)  # who waits for it sees that it is gone
    except BrokenPipeError:  # of who reads what is printed
        raise
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        raise InputError(cannot_write(folder, f"{path}{error.strerror or error}")) from None


def cannot_write(folder: object, reason: str) -> str:
    """The sentence about a file system that fails, as a full one does."""
    return f"{folder}: cannot be written ({reason}); free space or correct it and start again, finished work is kept"


def sweep(folder: Path) -> None:
    """Removes what killed writers have left below a folder: `files.atomic_file`'s temporary files."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One level: {"audio": {"loudness": 1}} -> {"loudness": 1}."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        out |= flat(value) if isinstance(value, dict) else {name: value}
    return out


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the difference of two settings as words, "seed was 0, is 1"; empty if they are equal."""
    before, after = flat(old), flat(new)
    return "; ".join(
        f"{name} was {before.get(name)!r}, is {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )


def require_same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any], remedy: str) -> None:
    """Refuses to go on with work that was begun with other settings."""
    if changed := difference(old, new):
        raise InputError(f"{folder}: was begun with other settings ({changed}); {remedy}")


def begin(
    folder: Path,
    name: str,
    state: Mapping[str, Any],
    remedy: str,
    compared: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> None:
    """Writes the state of new work to the file `name`, or finds that of the same work; work of another state is refused, as is
    a folder of something else. `compared`: what counts of a state, under names for a user."""
    sweep(folder)
    if earlier := read_json(folder / name):
        require_same(folder, compared(earlier), compared(state), remedy)
    else:
        require(not any(folder.iterdir()), f"{folder}: has files and no {name}; {remedy}")
        write_atomic(folder / name, json.dumps(state, indent=1) + "\n")
