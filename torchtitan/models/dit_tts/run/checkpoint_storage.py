"""Checkpoints on disk: DCP files with a manifest, complete or absent, and read as data only.

    step-1000.saving/         while it is written; the rename to step-1000 is the last thing done
    step-1000/
      __0_0.distcp ...        DCP's files, one or more per rank
      .metadata               DCP's table of tensors
      manifest.json           size and XXH3 of every file, and what the weights were trained with
    step-1000.corrupt/        set aside because it did not match its manifest
    step-1000.deleting/       while it is removed

DCP pickles its table and the entries that are no tensors, and its own reader runs what it finds there.
`load_checkpoint` takes the classes of DCP's table and plain values only.
"""

import enum
import io
import os
import pickle
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.models.dit_tts.bounded import read_bytes
from torchtitan.models.dit_tts.config.exported import WEIGHTS, is_exported
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.infra.collectives import (
    run_on_all_ranks,
    single_process,
)
from torchtitan.models.dit_tts.run.manifest import (
    METADATA,
    UnreadableError,
    reading_checkpoint,
    size_and_hash,
    verify_files,
    write_entries,
)

_LEFT_BEHIND = re.compile(r"step-(0|[1-9]\d*)\.(saving|deleting)")

# Classes in DCP's table, in torch 2.11 to 2.13.
_TABLE_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "Path"},
}


@dataclass(frozen=True)
class _HashedWriteResult(WriteResult):
    """The first result of each file also has the file's size and XXH3."""

    file: tuple[str, int, str] = ("", 0, "")


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes a checkpoint that appears under its name complete, with its manifest, or not at all.

    Args:
        path: the checkpoint's folder, step-N.
        trained_with: for the manifest.
    """

    def __init__(self, path: str | os.PathLike, trained_with: dict[str, Any]):
        super().__init__(f"{path}.saving")
        self.final_path = Path(path)
        self.trained_with = trained_with

    def storage_meta(self) -> StorageMeta:
        # Pickled paths name a module that not every Python has.
        return StorageMeta(str(self.checkpoint_id), self.save_id)

    def write_data(self, plan, planner) -> Future[list[WriteResult]]:
        results, known = [], set()
        for result in super().write_data(plan, planner).wait():
            name = result.storage_data.relative_path
            if name not in known:
                known.add(name)
                file = (name, *size_and_hash(Path(self.path) / name))
                result = _HashedWriteResult(**vars(result), file=file)
            results.append(result)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on the coordinator once every rank has written."""
        super().finish(metadata, results)
        folder = Path(self.path)
        read_table(folder)  # a table that cannot be read back must not become a checkpoint
        every = [result for of_rank in results for result in of_rank]
        files = [r.file for r in every if isinstance(r, _HashedWriteResult)]
        for name, *_ in files:
            require(
                (folder / name).exists(),
                f"{name} of another machine is not in {folder}, so they do not share the run folder",
            )
        files.append((METADATA, *size_and_hash(folder / METADATA)))
        write_entries(folder, files, self.trained_with)
        if self.final_path.exists():  # of the same step, from before a roll back
            remove_checkpoint(self.final_path)
        os.rename(folder, self.final_path)


def _enum_member(of: Any, name: Any) -> enum.Enum:
    """Replaces `getattr`, by which Python pickles an enum before 3.11.4."""
    if isinstance(of, enum.EnumMeta) and name in of.__members__:
        return of[name]
    raise InputError(f"it takes {name!r} from {of!r}, which no checkpoint of this program does")


class _TableUnpickler(pickle.Unpickler):
    """Unpickles the classes of DCP's table and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        module = "pathlib" if module == "pathlib._local" else module  # of Python 3.13 alone
        if name in _TABLE_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch":
            value = getattr(torch, name, None)
            if value is torch.Size or isinstance(value, torch.dtype):
                return value
        raise InputError(f"it names {module}.{name}, which no checkpoint of this program has")


class _TableReader(dcp.FileSystemReader):
    def __init__(self, path: Path):
        super().__init__(path)
        self.table = read_table(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.table.storage_meta is None:
            self.table.storage_meta = StorageMeta()
        self.table.storage_meta.load_id = self.load_id
        return self.table


class _PlainValues(dcp.DefaultLoadPlanner):
    """Reads entries that are no tensors as plain values; DCP's own would unpickle anything."""

    def load_bytes(self, read_item, value: IO[bytes]) -> None:
        name = read_item.dest_index.fqn
        try:
            plain = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise InputError(
                f"the entry {name} is not a plain value, and is not loaded as it could run code"
                + (f": it names {named.group(1)}" if named else "")
            ) from None
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def read_table(path: Path) -> Metadata:
    """DCP's table of a checkpoint, or of an exported folder's weights."""
    if is_exported(path):
        from safetensors import SafetensorError

        try:
            return dcp.HuggingFaceStorageReader(str(path)).read_metadata()
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise InputError(f"{path / WEIGHTS} cannot be read ({error}); copy it again") from None
    try:
        with reading_checkpoint(path / METADATA):
            content = read_bytes(path / METADATA)
        table = _TableUnpickler(io.BytesIO(content)).load()
    except UnreadableError:
        raise
    except InputError as error:
        raise InputError(f"{path / METADATA} is not read, as it could run code: {error}") from None
    except Exception as error:  # a pickle that is cut or changed can raise anything
        raise InputError(f"{path / METADATA} cannot be read ({error})") from None
    if not isinstance(table, Metadata) or not table.storage_data:
        raise InputError(f"{path / METADATA} does not say where a checkpoint's tensors are")
    return table


def load_checkpoint(state: dict[str, Any], path: Path, no_dist: bool = False) -> None:
    """`dcp.load` of a checkpoint, or of an exported folder's weights, as data; see the module.
    `no_dist`: only this rank loads; so it is where there is no other.
    """
    reader: dcp.FileSystemReader = (
        dcp.HuggingFaceStorageReader(str(path)) if is_exported(path) else _TableReader(path)
    )
    planner = _PlainValues()
    no_dist = no_dist or single_process()
    try:
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=no_dist)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, InputError):
                raise InputError(f"{path}: {cause}") from None
        raise


def verify(path: Path, part: tuple[int, int] = (0, 1)) -> str | None:
    """Verify files as `verify_files` does; the first process also reads a checkpoint's table, which may be corrupt as written."""
    problem = verify_files(path, part)
    if problem is None and part[0] == 0 and not is_exported(path):
        try:
            read_table(path)
        except UnreadableError:
            raise
        except InputError as error:
            return str(error)
    return problem


def verify_together(path: Path) -> str | None:
    """`verify` by all ranks, each other files: a sentence about a difference, the same on all, or None. A collective."""
    part = (dist.get_rank(), dist.get_world_size())
    found = run_on_all_ranks(lambda _: verify(path, part), f"verify {path}")
    return next((problem for problem in found if problem is not None), None)


def remove_left_behind(folder: Path) -> list[str]:
    """Removes what a kill in a save or a removal left: step-N.saving and step-N.deleting, nothing else.
    Returns the names."""
    names = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _LEFT_BEHIND.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            names.append(path.name)
    return names


def remove_checkpoint(path: Path) -> None:
    """Renamed first, so that no kill leaves half of a checkpoint under its name."""
    leaving = path.with_name(f"{path.name}.deleting")
    os.rename(path, leaving)
    shutil.rmtree(leaving)


def set_aside(path: Path) -> Path:
    """Renames a corrupt checkpoint to step-N.corrupt (or .corrupt-2 ...); returns the new path."""
    number, aside = 1, path.with_name(f"{path.name}.corrupt")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.corrupt-{number}")
    os.rename(path, aside)
    return aside
