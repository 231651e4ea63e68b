"""Fetch one item's audio, or its ready latents, from wherever its place says.

A place is a small dict of plain values, paths relative to the source's folder:

    {"file": path}                                a whole file
    {"file": path, "offset": s, "seconds": s}     a part of one, in seconds
    {"tar": path, "start": n, "bytes": n}         bytes of a member
    {"table": path, "group": g, "row": r, "column": name}                    one cell
    {"table": path, "group": g, "row": r, "latents": name, "reference": name}
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from torchtitan.models.dit_tts.data.storage import ShardFile, open_source
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.audio import decode

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.prepare.tables import TableCursor


@dataclass(frozen=True)
class Recording:
    """Decoded samples (n, channels) float32, and a digest of what they were decoded from."""

    samples: np.ndarray
    rate: int  # Hz
    digest: bytes


@dataclass(frozen=True)
class ReadyLatents:
    """Latents (T, C) and reference (R, C) that a table holds; R = 0 where it gives none."""

    latents: np.ndarray
    reference: np.ndarray
    digest: bytes


class Loader:
    """Opens a source's containers as items ask for them and keeps the last one of each kind open."""

    def __init__(self, root: str):
        self.root = root
        self._tar: ShardFile | None = None
        self._table: TableCursor | None = None

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def load(self, place: dict[str, Any], channels: int) -> Recording | ReadyLatents:
        """What a place holds.

        Args:
            channels: width of ready latents.

        Raises:
            InputError: not there, damaged, or not audio; without the name of the item.
        """
        if "latents" in place:
            return self._ready_latents(place, channels)
        if "offset" in place:
            path = self.path(place["file"])
            samples, rate = decode(path, place["offset"], place["seconds"])
            digest = xxhash.xxh3_128(samples.tobytes())
            digest.update(rate.to_bytes(8, "little"))
            return Recording(samples, rate, digest.digest())
        data = self._bytes(place)
        samples, rate = decode(data)
        return Recording(samples, rate, xxhash.xxh3_128_digest(data))

    def digest(self, place: dict[str, Any], channels: int) -> bytes:
        """The digest that `load` gives; bytes are not decoded for it."""
        if "latents" in place or "offset" in place:
            return self.load(place, channels).digest
        return xxhash.xxh3_128_digest(self._bytes(place))

    def close(self) -> None:
        if self._tar is not None:
            self._tar.close()
        self._tar = self._table = None

    def _bytes(self, place: dict[str, Any]) -> bytes:
        if "tar" in place:
            return self._tar_bytes(place)
        if "table" in place:
            value = self._cell(place, place["column"])
            if isinstance(value, bytes):
                return value
            path = os.path.join(os.path.dirname(self.path(place["table"])), value)
        else:
            path = self.path(place["file"])
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise InputError(f"the audio file {path} cannot be read ({error.strerror})") from None
        except ValueError:  # a NUL, or half a surrogate pair
            raise InputError(f"{path!r} is no path of an audio file") from None

    def _tar_bytes(self, place: dict[str, Any]) -> bytes:
        path = self.path(place["tar"])
        if self._tar is None or self._tar.path != path:
            if self._tar is not None:
                self._tar.close()
            self._tar = open_source(path)
        data = self._tar.pread(place["bytes"], place["start"])
        if len(data) != place["bytes"]:
            raise InputError(f"{path} ends before the audio does; it changed since it was listed")
        return data

    def _cursor(self, place: dict[str, Any], *columns: str) -> "TableCursor":
        from torchtitan.models.dit_tts.prepare.tables import TableCursor

        path = self.path(place["table"])
        if self._table is None or (self._table.path, self._table.columns) != (path, columns):
            self._table = TableCursor(path, columns)
        return self._table

    def _cell(self, place: dict[str, Any], column: str) -> bytes | str:
        """An audio cell: the bytes it holds, or the path it names."""
        value = self._cursor(place, column).row(place["group"], place["row"])[column].as_py()
        if isinstance(value, dict):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if not isinstance(value, (bytes, str)) or not value:
            raise InputError(f"column {column} has neither bytes nor a path")
        return value

    def _ready_latents(self, place: dict[str, Any], channels: int) -> ReadyLatents:
        from torchtitan.models.dit_tts.prepare.tables import matrix

        names = [place["latents"], *([place["reference"]] if place["reference"] else [])]
        row = self._cursor(place, *names).row(place["group"], place["row"])
        latents = matrix(row[names[0]], channels, names[0])
        if len(latents) == 0:
            raise InputError(f"column {names[0]} has no frame")
        reference = np.zeros((0, channels), np.float32)
        if place["reference"] and row[names[1]].is_valid:
            reference = matrix(row[names[1]], channels, names[1])
        digest = xxhash.xxh3_128(latents.tobytes())
        digest.update(reference.tobytes())
        return ReadyLatents(latents, reference, digest.digest())
