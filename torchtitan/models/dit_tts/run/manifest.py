"""manifest.json of a folder of weights: size and XXH3 of every file, which are compared before any is read, and what
the weights were trained with.

It imports no DCP (as `checkpoint_storage` does), which takes a second and which exported folders do not need.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from torchtitan.models.dit_tts.bounded import check_regular, read_json_file
from torchtitan.models.dit_tts.config.exported import files_read, is_exported
from torchtitan.models.dit_tts.errors import InputError, first_line
from torchtitan.models.dit_tts.files import write_atomic

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""DCP's table of tensors"""

_STEP = re.compile(r"step-(0|[1-9]\d*)")


class UnreadableError(InputError):
    """A checkpoint may be intact, but a file of it cannot be read: its disk is away or broken."""


@contextmanager
def reading_checkpoint(path: Path) -> Iterator[None]:
    """Raises UnreadableError where a file cannot be read."""
    try:
        yield
    except OSError as error:
        raise UnreadableError(
            f"{path} cannot be read ({error.strerror}); mount its disk or restore it, or move "
            f"{path.parent} away to continue without it"
        ) from None


def write_manifest(folder: Path, names: Collection[str], trained_with: dict[str, Any]) -> None:
    """Writes the manifest of files that lie in a folder."""
    files = [(name, *size_and_hash(folder / name)) for name in names]
    write_entries(folder, files, trained_with)


def write_entries(
    folder: Path, files: list[tuple[str, int, str]], trained_with: dict[str, Any]
) -> None:
    """Writes the manifest of (name, bytes, XXH3) of each file."""
    content = {
        "files": {name: {"bytes": size, "xxh3": digest} for name, size, digest in sorted(files)},
        "trained_with": trained_with,
    }
    write_atomic(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        UnreadableError: it is missing or cannot be read.
        InputError: it is corrupt.
    """
    try:
        with reading_checkpoint(path / MANIFEST):
            manifest = read_json_file(path / MANIFEST)
        assert isinstance(manifest["trained_with"], dict)
        for each in manifest["files"].values():
            assert isinstance(each["bytes"], int) and isinstance(each["xxh3"], str)
    except UnreadableError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise InputError(f"{path / MANIFEST} is corrupt ({first_line(error)})") from None
    return manifest


def verify_files(
    path: Path, part: tuple[int, int] = (0, 1), needed: Collection[str] = ()
) -> str | None:
    """Compares a checkpoint, or another folder, with its manifest. Returns a sentence about the first difference, or
    None.

    Args:
        part: (number, count) of processes that verify together, each other files.
        needed: files that the manifest must list, by default those of a checkpoint or an exported folder.

    Raises:
        UnreadableError: a file is missing or cannot be read, which does not say that it is corrupt.
    """
    try:
        files = read_manifest(path)["files"]
        for name in needed or (files_read(path) if is_exported(path) else [METADATA]):
            if name not in files:
                return f"{path / MANIFEST} does not list {name}"
        for name in sorted(files)[part[0] :: part[1]]:
            size = files[name]["bytes"]
            with reading_checkpoint(path / name):
                longer = (path / name).stat().st_size > size
                found = (0, "") if longer else size_and_hash(path / name)
            if longer or found[0] != size:
                return f"{path / name} has other bytes than {MANIFEST} says"
            if found[1] != files[name]["xxh3"]:
                return f"{path / name} has other content than {MANIFEST} says"
    except UnreadableError:
        raise
    except InputError as error:
        return str(error)
    return None


def size_and_hash(path: Path) -> tuple[int, str]:
    """(bytes, XXH3) of a file."""
    try:
        check_regular(path)
    except ValueError as error:
        raise InputError(f"{path} cannot be read ({error})") from None
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        return file.tell(), digest.hexdigest()


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's checkpoint folder, ascending. Only a folder of the exact name
    step-N is one, or a link to one, which may be on a disk that is away; its files may still be corrupt."""
    with reading_checkpoint(folder):
        paths = folder.iterdir() if folder.is_dir() else ()
        return sorted(
            int(match[1])
            for path in paths
            if (match := _STEP.fullmatch(path.name))
            and (path.is_dir() or (path.is_symlink() and not path.exists()))
        )
