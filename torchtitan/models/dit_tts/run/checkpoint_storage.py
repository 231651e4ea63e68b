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
import json
import os
import pickle
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from tqdm import tqdm

from torchtitan.models.dit_tts.bounded import check_regular, read_bytes, read_json_file
from torchtitan.models.dit_tts.config.exported import WEIGHTS, files_read, is_exported
from torchtitan.models.dit_tts.errors import InputError, first_line
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.infra.collectives import (
    one_thread_on_cpu_ranks,
    run_on_all_ranks,
    single_process,
)

MANIFEST = "manifest.json"
_METADATA = ".metadata"
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_LEFT_BEHIND = re.compile(r"step-(0|[1-9]\d*)\.(saving|deleting)")
_BLOCK_BYTES = 1 << 20

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


class UnreadableError(InputError):
    """A checkpoint may be intact, but a file of it cannot be read: its disk is away or broken."""


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableError(
            f"{path} cannot be read ({error.strerror}); mount its disk or restore it, or move "
            f"{path.parent} away to continue without it"
        ) from None


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

    def __reduce__(self):
        # DCP's own process for saving may have started without our modules.
        target = "torchtitan.models.dit_tts.run.checkpoint_storage:CheckpointWriter"
        from titan_tts.overlay import call_in_overlay

        return call_in_overlay, (target, self.final_path, self.trained_with)

    def storage_meta(self) -> StorageMeta:
        # Pickled paths name a module that not every Python has.
        return StorageMeta(str(self.checkpoint_id), self.save_id)

    def write_data(self, plan, planner) -> Future[list[WriteResult]]:
        results, known = [], set()
        for result in super().write_data(plan, planner).wait():
            name = result.storage_data.relative_path
            if name not in known:
                known.add(name)
                file = (name, *_size_and_hash(Path(self.path) / name))
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
        files.append((_METADATA, *_size_and_hash(folder / _METADATA)))
        _write_manifest(folder, files, self.trained_with)
        if self.final_path.exists():  # of the same step, from before a roll back
            remove_checkpoint(self.final_path)
        os.rename(folder, self.final_path)


def write_manifest(folder: Path, names: Collection[str], trained_with: dict[str, Any]) -> None:
    """Writes the manifest of files that lie in a folder."""
    files = [(name, *_size_and_hash(folder / name)) for name in names]
    _write_manifest(folder, files, trained_with)


def _write_manifest(
    folder: Path, files: list[tuple[str, int, str]], trained_with: dict[str, Any]
) -> None:
    content = {
        "files": {name: {"bytes": size, "xxh3": digest} for name, size, digest in sorted(files)},
        "trained_with": trained_with,
    }
    write_atomic(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


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
        with _reading(path / _METADATA):
            content = read_bytes(path / _METADATA)
        table = _TableUnpickler(io.BytesIO(content)).load()
    except UnreadableError:
        raise
    except InputError as error:
        raise InputError(f"{path / _METADATA} is not read, as it could run code: {error}") from None
    except Exception as error:  # a pickle that is cut or changed can raise anything
        raise InputError(f"{path / _METADATA} cannot be read ({error})") from None
    if not isinstance(table, Metadata) or not table.storage_data:
        raise InputError(f"{path / _METADATA} does not say where a checkpoint's tensors are")
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
        with one_thread_on_cpu_ranks():
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=no_dist)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, InputError):
                raise InputError(f"{path}: {cause}") from None
        raise


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        UnreadableError: it is missing or cannot be read.
        InputError: it is corrupt.
    """
    try:
        with _reading(path / MANIFEST):
            manifest = read_json_file(path / MANIFEST)
        assert isinstance(manifest["trained_with"], dict)
        for each in manifest["files"].values():
            assert isinstance(each["bytes"], int) and isinstance(each["xxh3"], str)
    except UnreadableError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise InputError(f"{path / MANIFEST} is corrupt ({first_line(error)})") from None
    return manifest


def verify(path: Path, part: tuple[int, int] = (0, 1), needed: Collection[str] = ()) -> str | None:
    """Compares a checkpoint, or another folder, with its manifest. Returns a sentence about the first difference, or
    None.

    Args:
        part: (number, count) of processes that verify together, each other files.
        needed: files that the manifest must list, by default those of a checkpoint or an exported folder.

    Raises:
        UnreadableError: a file is missing or cannot be read, which does not say that it is corrupt.
    """
    try:
        return _corruption(path, *part, needed)
    except UnreadableError:
        raise
    except InputError as error:
        return str(error)


def verify_together(path: Path) -> str | None:
    """`verify` by all ranks, each other files: a sentence about a difference, the same on all, or None. A collective."""
    part = (dist.get_rank(), dist.get_world_size())
    found = run_on_all_ranks(lambda _: verify(path, part), f"verify {path}")
    return next((problem for problem in found if problem is not None), None)


def _corruption(path: Path, number: int, count: int, needed: Collection[str]) -> str | None:
    files = read_manifest(path)["files"]
    for read in needed or (files_read(path) if is_exported(path) else [_METADATA]):
        if read not in files:
            return f"{path / MANIFEST} does not list {read}"
    names = sorted(files)[number::count]
    total = sum(files[name]["bytes"] for name in names)
    with tqdm(
        desc=f"verifying {path.name}",
        total=total,
        unit="B",
        unit_scale=True,
        delay=2.0,
        disable=number > 0,
    ) as bar:
        for name in names:
            with _reading(path / name):
                longer = (path / name).stat().st_size > files[name]["bytes"]
                size, content = (0, "") if longer else _size_and_hash(path / name, bar)
            if longer or size != files[name]["bytes"]:
                return f"{path / name} has other bytes than {MANIFEST} says"
            if content != files[name]["xxh3"]:
                return f"{path / name} has other content than {MANIFEST} says"
    if _METADATA in names:
        read_table(path)
    return None


def _size_and_hash(path: Path, bar: tqdm | None = None) -> tuple[int, str]:
    try:
        check_regular(path)
    except ValueError as error:
        raise InputError(f"{path} cannot be read ({error})") from None
    digest, size = xxhash.xxh3_64(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            if bar is not None:
                bar.update(len(block))
    return size, digest.hexdigest()


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's checkpoint folder, ascending. Only a folder of the exact name
    step-N is one, or a link to one, which may be on a disk that is away; its files may still be corrupt."""
    with _reading(folder):
        paths = folder.iterdir() if folder.is_dir() else ()
        return sorted(
            int(match[1])
            for path in paths
            if (match := _STEP.fullmatch(path.name))
            and (path.is_dir() or (path.is_symlink() and not path.exists()))
        )


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
