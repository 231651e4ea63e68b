"""Fetch one item's audio, or its ready latents, from its place.

A place is a small dict of plain values, paths relative to the source's folder:

    {"file": path}                                a file
    {"file": path, "offset": s, "seconds": s}     a part of it, in seconds
    {"tar": path, "start": n, "bytes": n}         bytes of a member
    {"table": path, "group": g, "row": r, "column": name}                    one cell
    {"table": path, "group": g, "row": r, "latents": name, "reference": name}
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.models.dit_tts.audio import decode, to_mono
from torchtitan.models.dit_tts.data.storage import ShardFile, open_source
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.formats import open_corpus
from torchtitan.models.dit_tts.prepare.listing import Plan, usable_items
from torchtitan.models.dit_tts.prepare.settings import Options

if TYPE_CHECKING:  # pyarrow takes long to import
    from torchtitan.models.dit_tts.prepare.formats.table import TableCursor


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
    replaced_reference: bool = False  # the table's was a part of the latents


class Loader:
    """Opens a source's containers as items ask for them; the last one of each kind stays open."""

    def __init__(self, root: str):
        self.root = root
        self._tar: ShardFile | None = None
        self._table: TableCursor | None = None

    def load(self, place: dict[str, Any], channels: int) -> Recording | ReadyLatents:
        """What a place holds.

        Args:
            channels: width of ready latents.

        Raises:
            InputError: not there, corrupt, or not audio; without the name of the item.
        """
        if "latents" in place:
            return self._ready_latents(place, channels)
        if "offset" in place:
            path = os.path.join(self.root, place["file"])
            return Recording(*decode(path, place["offset"], place["seconds"]))
        return Recording(*decode(self._bytes(place)))

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
            path = os.path.join(self.root, os.path.dirname(place["table"]), value)
        else:
            path = os.path.join(self.root, place["file"])
        try:
            if os.path.exists(path) and not os.path.isfile(path):  # without an end
                raise ValueError("is no regular file")
            return Path(path).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"the audio file {path!r} cannot be read ({reason})") from None

    def _tar_bytes(self, place: dict[str, Any]) -> bytes:
        path = os.path.join(self.root, place["tar"])
        if self._tar is None or self._tar.path != path:
            self.close()
            self._tar = open_source(path)
        data = self._tar.pread(place["bytes"], place["start"])
        if len(data) != place["bytes"]:
            raise InputError(f"{path} ends before the audio does; it changed since it was listed")
        return data

    def _cursor(self, place: dict[str, Any], *columns: str) -> "TableCursor":
        from torchtitan.models.dit_tts.prepare.formats.table import TableCursor

        path = os.path.join(self.root, place["table"])
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
        from torchtitan.models.dit_tts.prepare.formats.table import matrix

        names = [place["latents"], *([place["reference"]] if place["reference"] else [])]
        row = self._cursor(place, *names).row(place["group"], place["row"])
        latents = matrix(row[names[0]], channels, names[0])
        if len(latents) == 0:
            raise InputError(f"column {names[0]} has no frame")
        reference = np.zeros((0, channels), np.float32)
        if place["reference"] and row[names[1]].is_valid:
            reference = matrix(row[names[1]], channels, names[1])
        return ReadyLatents(latents, reference)


@dataclass(frozen=True)
class Utterance:
    """One recording of a corpus tar."""

    key: str
    waveform: Tensor  # (samples,) float32 in [-1, 1], the mean of the channels
    sample_rate: int  # Hz
    text: str
    speaker: str
    split: str  # "train" or "heldout"
    metadata: dict[str, Any]


def read_audio_corpus(path: str | Path) -> Iterator[Utterance]:
    """The recordings of an audio-WebDataset tar in their order, as they are, one in memory at a time.

    Raises:
        InputError: no such file, or a recording or tar that is corrupt or incomplete.
    """
    reader = open_corpus(Options(str(path), "", format="webdataset"))
    loader = Loader(reader.root)
    try:
        for item in usable_items(reader, str(path), "raise", Plan()):
            try:
                recording = loader.load(item.audio, 0)
            except InputError as error:
                raise InputError(f"{path}: {item.key}: {error}; replace it") from None
            assert isinstance(recording, Recording)
            yield Utterance(
                item.key,
                torch.from_numpy(to_mono(recording.samples)),
                recording.rate,
                item.text,
                item.speaker,
                item.split,
                item.metadata,
            )
    finally:
        loader.close()
