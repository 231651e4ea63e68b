"""A preparation works in OUTPUT.partial, next to OUTPUT, and renames it to OUTPUT at the end.

    .OUTPUT.lock               held by the process that works here
    OUTPUT.partial/
      state.json               settings, source and versions of the work
      run.json                 what workers need to know
      items.jsonl ...          the list of recordings
      chunks/                  encoded recordings, as shards
      train/ heldout/          shards
      prepare.json             the record

Every file appears complete or not at all. The last steps are: prepare.json is written, the folder is renamed to OUTPUT,
and what is not the output's is removed from it. The next run after a kill does what is missing of them.
"""

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from titan_tts.jobs import workspace
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import check_writable, sync_folder

RECORD_NAME, STATE_NAME = "prepare.json", "state.json"
# Changes with the record and with the processing of recordings: work of another version is not continued.
RECORD_VERSION = 5
# Changes with the other files of the work folder.
WORK_VERSION = 3
_LISTED = ("items.jsonl", "chunk_starts.npy", "plan.json", "run.json")
_SCRATCH = ("chunks", *_LISTED, STATE_NAME)  # the state goes last


def working_in_partial(output: Path) -> AbstractContextManager[Path]:
    """The work folder of an output, made if absent, for this process alone; an empty one is removed."""
    check_writable(output / RECORD_NAME, "OUTPUT")
    folder = output.with_name(output.name + ".partial")
    return workspace.working_in(
        folder, output.with_name(f".{output.name}.lock"), "prepare", "OUTPUT"
    )


def read_record(output: Path) -> dict[str, Any] | None:
    """The prepare.json of this command, of any version; None where there is none."""
    return read_json(output / RECORD_NAME, version=int, settings=dict, shards=dict) or None


def is_empty(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def has_all_shards(output: Path, record: dict[str, Any]) -> bool:
    """True if every shard of a record is there with its size."""
    return all(
        (output / name).is_file() and (output / name).stat().st_size == shard["bytes"]
        for name, shard in record["shards"].items()
    )


def begin(folder: Path, state: dict[str, Any]) -> None:
    """Set the work folder up for `state`, or find it set up; the work of another state is refused."""
    remedy = "remove the folder, or give another OUTPUT"
    workspace.begin(folder, STATE_NAME, state, remedy, partial(_compared, now=state))


def _compared(state: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """All on which the samples may depend, under names for a user."""
    same = state.get("source_digest") == now["source_digest"]
    versions = state.get("versions", {}) | {"prepare": state.get("version")}
    source = "as it is now" if same else "another, or changed since"
    return {**state.get("settings", {}), "source": source} | {
        f"version of {name}": each for name, each in versions.items()
    }


def remove_scratch(folder: Path) -> None:
    """Remove what is of the work and not of its output."""
    for path in (folder / name for name in _SCRATCH):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def finish(folder: Path, output: Path) -> None:
    """Rename a complete work folder to the output, which is absent or empty."""
    workspace.sweep(folder)
    if not is_empty(output):
        raise InputError(
            f"{output}: was created meanwhile, so it is not replaced; move it away and start again, the work is kept in "
            f"{folder}"
        )
    if output.exists():
        output.rmdir()
    folder.rename(output)
    sync_folder(output.parent)
    remove_scratch(output)
