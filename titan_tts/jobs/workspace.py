"""The folder in which a command does its jobs: a lock, and the settings of the work."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import held


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
