"""Where a preparation works until it is complete: OUTPUT.partial beside OUTPUT, found again later.

    OUTPUT.partial/
      lock                     held by the process that works here
      state.json               settings, source, versions: what the rest was made from
      run.json                 what workers need to know
      items.jsonl ...          the plan
      chunks/                  latents, one file a chunk
      table/                   columns over all samples
      shards_of                digest of the chunks that the shards were made from
      train/ heldout/          shards
      prepare.json report.md   the record: with it the output is complete
      replaced/                the earlier OUTPUT, for the moment in which one takes the other's place

All files appear whole. The last steps are: prepare.json is written, the scratch files go, the folder is
renamed to OUTPUT. Each can be cut short and is done again by the next run.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.prepare.settings import difference
from torchtitan.models.dit_tts.text.feature_store import FOLDER_NAME, SUFFIX

RECORD_NAME, REPORT_NAME, STATE_NAME = "prepare.json", "report.md", "state.json"
# Of the record and of what the code makes of a recording: work under another is not gone on with.
RECORD_VERSION = 3
_LOCK_NAME, _REPLACED_NAME, _SHARDS_OF_NAME = "lock", "replaced", "shards_of"
_SPLIT_NAMES = ("train", "heldout")
_OUTPUT_NAMES = {*_SPLIT_NAMES, RECORD_NAME, REPORT_NAME, _LOCK_NAME, _REPLACED_NAME}
_RECORD_KEYS = {"settings": dict, "shards": dict, "source_digest": str, "summary": dict}
_SCRATCH = (
    "chunks",
    "table",
    "items.jsonl",
    "chunk_starts.npy",
    "plan.json",
    "run.json",
    _SHARDS_OF_NAME,
    STATE_NAME,
)


def partial_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


@contextmanager
def locked(output: Path) -> Iterator[Path]:
    """The work folder of an output, made if absent, for this process alone.

    Raises:
        InputError: another process works on it, or its place cannot be written.
    """
    folder = partial_path(output)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    for _ in range(100):  # another run may finish and take the folder away in any moment
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(folder / _LOCK_NAME, flags, 0o666)
            except FileNotFoundError:
                continue
        except OSError as error:
            raise InputError(
                f"{folder}: cannot be written ({error.strerror}); give an output folder in a place "
                "that can"
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{folder}: another titan-tts prepare is at work there; wait for it or give "
                    "another output folder"
                ) from None
            except OSError as error:
                raise InputError(
                    f"{folder}: no lock can be taken there ({error.strerror}); give an output folder "
                    "on a file system that has locks"
                ) from None
            if _is_at(descriptor, folder / _LOCK_NAME):
                yield folder
                return
        finally:
            os.close(descriptor)
    raise InputError(f"{folder}: comes and goes; wait until no other run is at work there")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`: its folder may have been renamed."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_record(output: Path) -> dict[str, Any] | None:
    """The record of what this command made, also another version of it; None where it is none."""
    record = read_json(output / RECORD_NAME)
    if record is None or not isinstance(record.get("version"), int):
        return None
    # An earlier version had at least these two.
    names = list(_RECORD_KEYS)[: None if record["version"] == RECORD_VERSION else 2]
    known = all(isinstance(record.get(name), _RECORD_KEYS[name]) for name in names)
    return record if known else None


def foreign_name(output: Path, record: dict[str, Any]) -> str | None:
    """A path in an output that this command did not make, which must not go with it."""
    for path in sorted(output.iterdir()):
        if path.name.startswith(f".{RECORD_NAME}."):  # left by a writer that was killed
            continue
        if path.name not in _OUTPUT_NAMES:
            return path.name
        if path.name in _SPLIT_NAMES:
            # Indices begin with their shard's name, what a killed writer left with a dot before it.
            shards = tuple(name.partition("/")[2] for name in record["shards"])
            for inner in sorted(path.iterdir()) if path.is_dir() else ():
                if inner.name == FOLDER_NAME and _holds_only_features(inner):
                    continue
                if not inner.name.lstrip(".").startswith(shards):
                    return f"{path.name}/{inner.name}"
    return None


def _holds_only_features(folder: Path) -> bool:
    """Whether a folder has text features alone, which were made from the shards beside it."""
    for path in folder.rglob("*"):
        # What a killed writer left has a dot before and a random ending behind the name.
        abandoned = path.name.startswith(".") and SUFFIX in path.name
        if path.is_file() and not path.name.endswith(SUFFIX) and not abandoned:
            return False
    return True


def is_empty(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def has_all_shards(output: Path, record: dict[str, Any]) -> bool:
    """Whether every shard of a record is there with its size."""
    for name, shard in record["shards"].items():
        path = output / name
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            return False
    return True


def begin(folder: Path, state: dict[str, Any], overwrite: bool) -> None:
    """Set the work folder up for `state`, or find it set up; with `overwrite` other work goes.

    Raises:
        InputError: it holds work under other settings or of another state of the source.
    """
    found = read_json(folder / STATE_NAME)
    record = read_record(folder)
    if found is None and record is not None:  # cut short where only the last steps were left
        found = record_state(record)
    if found is None:
        foreign = [p.name for p in folder.iterdir() if p.name[0] != "." and p.name != _LOCK_NAME]
        if foreign:
            raise InputError(
                f"{folder}: is where the work is done, but holds {foreign[0]}, which is none of it; "
                "move it away or give another output folder"
            )
    elif found != state:
        if not overwrite:
            raise InputError(
                f"{folder}: holds the work of an earlier run {_state_change(found, state)}; pass "
                "--overwrite to drop it, or remove the folder"
            )
    if found != state or record is not None:
        clear(folder)
        write_atomic(folder / STATE_NAME, json.dumps(state))


def _state_change(old: dict[str, Any], new: dict[str, Any]) -> str:
    if changed := difference(old.get("settings", {}), new["settings"]):
        return f"on other settings ({changed})"
    versions = [
        (state.get("versions") or {}) | {"prepare": state.get("version")} for state in (old, new)
    ]
    if changed := difference(*versions):
        return f"by other versions ({changed}), whose samples may differ"
    return "on a source that has changed since"


def restore(folder: Path, output: Path) -> None:
    """Put an earlier output back that a cut short `finish` had set aside without its successor."""
    replaced = folder / _REPLACED_NAME
    if replaced.exists() and is_empty(output):
        if output.exists():
            output.rmdir()
        replaced.rename(output)
        _sync_folder(output.parent)


def keep_shards_of(folder: Path, digest: str) -> None:
    """Drop shards that were made from other chunks than those of this digest."""
    path = folder / _SHARDS_OF_NAME
    if path.exists() and path.read_text() == digest:
        return
    for name in _SPLIT_NAMES:
        _remove(folder / name)
    write_atomic(path, digest)


def discard(folder: Path) -> None:
    """Remove a work folder in which nothing is worth keeping."""
    clear(folder)
    leave(folder)


def leave(folder: Path) -> None:
    """Remove a work folder where nothing but the lock is in it."""
    (folder / _LOCK_NAME).unlink(missing_ok=True)
    if is_empty(folder):
        folder.rmdir()


def clear(folder: Path) -> None:
    """Remove everything that a preparation made in its work folder, but the lock.

    The state goes last: as long as it is there, the folder is known for what it is.
    """
    replaced = folder / _REPLACED_NAME
    if replaced.exists():  # an output that was on its way out; it is the user's to decide over
        raise InputError(f"{replaced}: is an earlier output; move it away and start again")
    for name in (*_SPLIT_NAMES, RECORD_NAME, REPORT_NAME, *_SCRATCH):
        _remove(folder / name)


def finish(folder: Path, output: Path, replaces: dict[str, Any] | None = None) -> None:
    """Put a complete work folder in the output's place. May be cut short and done again.

    Args:
        replaces: the record of the output that may go; where another thing is there, nothing does.

    Raises:
        InputError: the output's place is taken, or cannot be written. The work is kept.
    """
    try:
        _finish(folder, output, replaces)
    except OSError as error:
        raise InputError(
            f"{output}: cannot be put in its place ({error.strerror}); what was made is whole in "
            f"{folder}: mend it and start again, or rename that folder"
        ) from None


def _finish(folder: Path, output: Path, replaces: dict[str, Any] | None) -> None:
    for name in _SCRATCH:
        _remove(folder / name)
    for path in folder.rglob(".*.tmp"):  # what a killed writer left
        _remove(path)
    replaced = folder / _REPLACED_NAME
    if not is_empty(output):
        found = read_record(output)
        if found is None or found != replaces or foreign_name(output, found):
            raise InputError(
                f"{output}: was made or changed by others while the work was done, so it is not "
                f"replaced; move it away and start again, what was made is kept in {folder}"
            )
        _remove(replaced)
        output.rename(replaced)
    elif output.exists():
        output.rmdir()
    folder.rename(output)
    _sync_folder(output.parent)
    tidy(output)


def tidy(output: Path) -> None:
    """Remove what `finish` leaves behind where it is cut short after its rename."""
    (output / _LOCK_NAME).unlink(missing_ok=True)
    shutil.rmtree(output / _REPLACED_NAME, ignore_errors=True)


def is_finishing(folder: Path, state: dict[str, Any]) -> bool:
    """Whether the folder is complete for these settings and only `finish` is left to do."""
    record = read_record(folder)
    if record is None or record["version"] != RECORD_VERSION:
        return False
    # Whole under whatever versions of the libraries: nothing is added to it.
    same = all(record[name] == state[name] for name in ("settings", "source_digest"))
    return same and has_all_shards(folder, record)


def record_state(record: dict[str, Any]) -> dict[str, Any]:
    """What a record says that the output was made from, as `begin` takes it."""
    return {name: record.get(name) for name in ("version", "versions", "settings", "source_digest")}


def cannot_write(folder: str | Path, error: OSError) -> str:
    """The sentence about a file system that fails, as a full one does."""
    place = f"{error.filename}: " if error.filename else ""
    return (
        f"{folder}: the work cannot go on ({place}{error.strerror or error}); make room or mend it and "
        "start again, what is done is kept"
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
