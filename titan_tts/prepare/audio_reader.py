"""Fetch an utterance's audio, or its ready latents, from its place, `Utterance.audio`.

A place is a small dict of plain values, paths relative to the source's folder:

    {"file": path}                                a file
    {"file": path, "offset": s, "seconds": s}     a part of it, in seconds
    {"tar": name, "start": n, "bytes": n}         bytes of a member, by the name that `files` has
    {"table": path, "group": g, "row": r, "column": name}                    one cell
    {"table": path, "group": g, "row": r, "latents": name, "reference": name or None}    of a shard with "rows"
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_tts.prepare.formats import SourceError, unreadable
from titan_tts.records.utterance import Utterance
from torchtitan.models.dit_tts.data.storage import ShardFile, open_source, plain_name
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import path_on_disk
from torchtitan.models.dit_tts.speech.audio import MAX_SECONDS, decode

if TYPE_CHECKING:  # pyarrow takes long to import
    from titan_tts.prepare.formats.table import TableCursor


@dataclass(frozen=True)
class Recording:
    """Decoded samples (n, channels) float32."""

    samples: np.ndarray
    rate: int  # Hz


@dataclass(frozen=True)
class ReadyLatents:
    """Latents (T, C) and reference (R, C) of a table; R = 0 where it has none."""

    latents: np.ndarray
    reference: np.ndarray


class Loader:
    """Opens the containers of a reader's `root` and `files`; the last one of each kind stays open. `longest`: seconds of a
    recording, as `decode` counts them."""

    def __init__(
        self, root: str, files: dict[str, str] | None = None, longest: float = MAX_SECONDS
    ):
        self.root, self.files, self.longest = root, files or {}, longest
        self._tar: ShardFile | None = None
        self._table: TableCursor | None = None

    def load(self, place: dict[str, Any], channels: int) -> Recording | ReadyLatents:
        """The audio, or the latents of `channels` channels, at a place.

        Raises:
            SourceError: the disk or store fails.
            InputError: missing, corrupt, or not audio; without the name of the item.
        """
        if "latents" in place:
            return self._ready_latents(place, channels)
        if "offset" in place:
            path = os.path.join(self.root, place["file"])
            try:
                part = place["offset"], place["seconds"]
                return Recording(*decode(path, *part, longest=self.longest))
            except InputError:
                _check_readable(path)
                raise
        name = place.get("file", "")
        return Recording(*decode(self._bytes(place), name=name, longest=self.longest))

    def references(self, utterance: Utterance) -> list[Recording]:
        """The recordings that are an utterance's own reference; raises as `load`."""
        paths = utterance.reference.files if utterance.reference else ()
        places = ({"file": path} for path in paths)
        return [Recording(*decode(self._bytes(each), name=each["file"])) for each in places]

    def _bytes(self, place: dict[str, Any]) -> bytes:
        if "tar" in place:
            return self._tar_bytes(place)
        if "table" in place:
            value = self._cell(place)
            if isinstance(value, bytes):
                return value
            folder = os.path.join(self.root, os.path.dirname(place["table"]))
            path = os.path.join(folder, path_on_disk(folder, value))
        else:
            path = os.path.join(self.root, place["file"])
        try:
            if os.path.exists(path) and not os.path.isfile(path):  # without an end
                raise ValueError("is not a regular file")
            return Path(path).read_bytes()
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from None

    def _tar_bytes(self, place: dict[str, Any]) -> bytes:
        path = self.files[place["tar"]]
        try:
            if self._tar is None or self._tar.path != path:
                if self._tar is not None:
                    self._tar.close()
                self._tar = open_source(path)
            data = self._tar.pread(place["bytes"], place["start"])
        except InputError as error:
            raise SourceError(str(error)) from None
        if len(data) != place["bytes"]:
            raise SourceError(f"{plain_name(path)} ends before the audio does; it has changed")
        return data

    def _cursor(self, place: dict[str, Any], *columns: str) -> "TableCursor":
        from titan_tts.prepare.formats.table import TableCursor

        path = os.path.join(self.root, place["table"])
        if self._table is None or (self._table.path, self._table.columns) != (path, columns):
            self._table = TableCursor(path, columns)
        return self._table

    def _cell(self, place: dict[str, Any]) -> bytes | str:
        """The bytes of an audio cell, or the path that it names."""
        column = place["column"]
        value = self._cursor(place, column).row(place["group"], place["row"])[column]
        if isinstance(value, dict):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if not isinstance(value, (bytes, str)) or not value:
            raise InputError(f"column {column} has neither bytes nor a path")
        return value

    def _ready_latents(self, place: dict[str, Any], channels: int) -> ReadyLatents:
        from titan_tts.prepare.formats.table import matrix

        names = [name for name in (place["latents"], place["reference"]) if name]
        row = self._cursor(place, *names).row(place["group"], place["row"])
        rows = place.get("rows", [None, None])
        latents = matrix(row[names[0]], channels, names[0], rows[0])
        if len(latents) == 0:
            raise InputError(f"column {names[0]} has no frame")
        reference = np.zeros((0, channels), np.float32)
        if len(names) == 2 and row[names[1]] is not None:
            reference = matrix(row[names[1]], channels, names[1], rows[1])
        return ReadyLatents(latents, reference)


def _check_readable(path: str) -> None:
    """Raises SourceError where a decoder failed because the disk does."""
    try:
        with open(path, "rb") as file:
            while file.read(1 << 20):
                pass
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
