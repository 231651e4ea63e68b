"""Open a dataset of tar shards and read any sample by offset.

>>> dataset = open_dataset("data/train")           # folder, .tar, glob, URL, or a list of these
>>> dataset.sample_id(0), int(dataset.frames[0])
('000000:utt0001', 113)
>>> latents, reference = dataset.read(0)           # float32 (113, 128), (R, 128)

``load`` brings a sample's arrays and JSON with one read of the file: no tar parsing, no
memory map (whose resident size grows with all it ever touched), and a check of every byte
against the hash in the index.
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import xxhash
from tqdm import tqdm

from torchtitan.models.dit_tts.data.index import ShardIndex, load_index
from torchtitan.models.dit_tts.data.joining import (
    damaged_samples,
    joined_labels,
    shard_name,
    shard_names,
)
from torchtitan.models.dit_tts.data.local_reader import (
    PARTS,
    ROW,
    LocalFiles,
    SampleExtents,
    fill,
    layout_of,
)
from torchtitan.models.dit_tts.data.range_cache import Extent, RangeReader
from torchtitan.models.dit_tts.data.shard import LABELS, Problem
from torchtitan.models.dit_tts.data.storage import find_shards, plain_name
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote, user_cache_folder

# Threads that wait on disks or servers while indexes are opened.
_LOCAL_OPENERS, _REMOTE_OPENERS = 8, 32


class CorruptSampleError(InputError):
    """A sample whose stored bytes are not those that were indexed."""


class LoadedSample(NamedTuple):
    """latents (frames, C), reference (reference frames, C), metadata: the JSON's object."""

    latents: np.ndarray
    reference: np.ndarray
    metadata: dict[str, Any]


def open_dataset(
    path: str | Sequence[str],
    latent_channels: int = 128,
    *,
    on_error: str = "raise",
    max_corrupt_fraction: float = 0.01,
    cache_folder: str = "",
    cache_bytes: int = 0,
    part: tuple[int, int] = (0, 1),
) -> "Dataset":
    """Open the shards at ``path`` and make indexes where none are stored.

    Args:
        path: a folder (its ``*.tar``, sorted by name, not below), one ``.tar`` file, a glob, a
            pattern with braces, or a URL of one of these; or several of them.
        latent_channels: width C that every stored array must have.
        on_error: "raise", or "skip" to leave damaged samples out, or "report" to do so however
            many they are and even if no sample is left: for looking at ``problems``.
        max_corrupt_fraction: with "skip", the share of damaged samples above which it raises all
            the same.
        cache_folder, cache_bytes: where bytes read from URLs are kept, and how many; see
            ``RangeReader``.
        part: (number, count) of processes that start together: each begins with other shards, so
            that together they make every missing index about once. The first shows progress.

    Raises:
        InputError: nothing there, a damaged shard, or arrays of another width.
    """
    entries = [path] if isinstance(path, str) else list(path)
    if not entries:
        entries = [""]  # find_shards has the sentence
    tar_paths: list[str] = []
    sources: list[int] = []
    for number, entry in enumerate(entries):
        found = find_shards(entry)
        tar_paths += found
        sources += [number] * len(found)
    _refuse_twice(tar_paths)
    indexes = _load_indexes(tar_paths, part)
    for tar_path, index in zip(tar_paths, indexes, strict=True):
        if len(index) and index.channels != latent_channels:
            raise InputError(
                f"{plain_name(tar_path)}: its arrays are {index.channels} wide (first sample "
                f"'{index.key(0)}') where data.latent_channels is {latent_channels}; set it to "
                f"{index.channels} or use another archive."
            )
    reader = None
    if any(map(is_remote, tar_paths)):
        reader = RangeReader(cache_folder or user_cache_folder("data"), cache_bytes)
    dataset = Dataset(tar_paths, indexes, sources, latent_channels, reader)
    _judge_problems(dataset, on_error, max_corrupt_fraction)
    return dataset


def _load_indexes(tar_paths: list[str], part: tuple[int, int]) -> list[ShardIndex]:
    number, count = part
    first = len(tar_paths) * number // count
    rotated = tar_paths[first:] + tar_paths[:first]
    openers = _REMOTE_OPENERS if any(map(is_remote, tar_paths)) else _LOCAL_OPENERS
    with ThreadPoolExecutor(min(openers, len(tar_paths)), thread_name_prefix="index") as pool:
        indexes = list(
            tqdm(
                pool.map(load_index, rotated),
                "opening shards",
                len(rotated),
                unit="shard",
                delay=2.0,  # indexes that are there already need no bar
                disable=number > 0,
            )
        )
    return indexes[len(indexes) - first :] + indexes[: len(indexes) - first]


def _refuse_twice(tar_paths: list[str]) -> None:
    seen: set[str] = set()
    for tar_path in tar_paths:
        if plain_name(tar_path) in seen:
            raise InputError(
                f"data.path names {plain_name(tar_path)} twice; give each archive once, and "
                "data.weights to draw one more often."
            )
        seen.add(plain_name(tar_path))


def _judge_problems(dataset: "Dataset", on_error: str, max_corrupt_fraction: float) -> None:
    assert on_error in ("raise", "skip", "report")
    if not dataset.problems or on_error == "report":
        return
    tar_path, first = dataset.problems[0]
    tar_path = plain_name(tar_path)
    count = len(dataset.problems)
    lost = dataset.damaged_samples
    more = f" ({count - 1} more: titan-tts data doctor lists them)" if count > 1 else ""
    if on_error == "raise":
        raise InputError(f"{tar_path}: {first.sentence}{more}")
    share = lost / (lost + len(dataset))
    if share > max_corrupt_fraction or not len(dataset):
        raise InputError(
            f"about {lost} damaged samples beside {len(dataset)} sound ones are {share:.1%}, more "
            f"than data.max_corrupt_fraction = {max_corrupt_fraction:g} allows; the first: {tar_path}: "
            f"{first.sentence}{more}"
        )


class Dataset:
    """All samples of some shards, numbered from 0 in order of shards and of members.

    Columns, numpy arrays of one row a sample: ``shard`` (number of its shard), ``source``
    (number of the entry of ``data.path`` that it came from), ``frames`` and
    ``reference_frames`` (25 a second by default), ``text_bytes`` and ``text_chars`` (length of
    the text in utf-8 and in code points), ``latents_hash`` (XXH3 of the latents' bytes).

    Attributes:
        characters: the distinct characters of all texts, in ascending order.
        problems: (tar path, problem) of all that the indexes leave out.
        damaged_samples: how many samples that are. Of a tar that is itself damaged nobody knows
            how many it had: it is taken to have had as many as the sound ones have.
        shard_digests: of each shard's contents, in hex.
        fingerprint: of names and contents, of no times and no folders: a copied dataset is the
            same dataset.

    Reads may come from any thread.
    """

    def __init__(
        self,
        tar_paths: Sequence[str],
        indexes: Sequence[ShardIndex],
        sources: Sequence[int],
        latent_channels: int,
        reader: RangeReader | None = None,
    ):
        self.tar_paths = list(tar_paths)
        self.latent_channels = latent_channels
        self._reader = reader
        self._shard_names = shard_names(self.tar_paths)
        self._tar_bytes = [index.tar_bytes for index in indexes]
        self._tar_versions = [index.tar_version for index in indexes]
        self._files = LocalFiles(self.tar_paths, self._tar_bytes)
        self._remote = [is_remote(tar_path) for tar_path in tar_paths]
        lengths = [len(index) for index in indexes]
        self._first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.shard = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        self.source = np.repeat(np.asarray(sources, dtype=np.int32), lengths)

        def column(name: str) -> np.ndarray:
            return np.concatenate([index.columns[name] for index in indexes])

        self._rows = np.empty(len(self.shard), ROW)
        for name in ROW.names:
            self._rows[name] = self.shard if name == "shard" else column(name)
        self.frames = self._rows["frames"].copy()
        self.reference_frames = self._rows["reference_frames"].copy()
        self.text_bytes = column("text_bytes")
        self.text_chars = column("text_chars")
        self._key_end = column("key_end")
        self._keys = [index.keys for index in indexes]
        self._labels = {name: joined_labels(indexes, name) for name in LABELS}
        self.characters = "".join(sorted(set().union(*(index.characters for index in indexes))))
        self.problems: list[tuple[str, Problem]] = [
            (tar_path, problem)
            for tar_path, index in zip(tar_paths, indexes, strict=True)
            for problem in index.problems
        ]
        self.damaged_samples = damaged_samples(indexes)
        self.shard_digests = [index.digest.hex() for index in indexes]
        digest = hashlib.sha256()
        for tar_path, shard_digest in zip(tar_paths, self.shard_digests, strict=True):
            name = shard_name(tar_path).encode("utf-8", "surrogateescape")
            digest.update(name + b"\0" + bytes.fromhex(shard_digest))
        self.fingerprint: str = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def shard_names(self) -> list[str]:
        """Name of each shard as ``sample_id`` has it."""
        return list(self._shard_names)

    @property
    def tar_bytes(self) -> list[int]:
        """Size of each shard."""
        return list(self._tar_bytes)

    @property
    def latents_item_bytes(self) -> np.ndarray:
        """(n,) 2 for float16 and 4 for float32."""
        return self._rows["latents_item_bytes"]

    @property
    def latents_hash(self) -> np.ndarray:
        return self._rows["latents_hash"]

    def labels(self, name: str) -> tuple[np.ndarray, list[str]]:
        """(code of each sample (n,) int32, value of each code): -1 where the JSON has none.

        Args:
            name: one of ``LABELS``.
        """
        return self._labels[name]

    def key(self, sample: int) -> str:
        """The sample's name within its shard."""
        shard = int(self.shard[sample])
        start = int(self._key_end[sample - 1]) if sample > self._first[shard] else 0
        return self._keys[shard][start : int(self._key_end[sample])].decode("utf-8")

    def sample_id(self, sample: int) -> str:
        """``shard:key``, the shard being the tar's file name without ``.tar``.

        Where two shards have one name, as many of their folders as tell all apart come before it.
        """
        return f"{self._shard_names[int(self.shard[sample])]}:{self.key(sample)}"

    def load(
        self,
        sample: int,
        latents_out: np.ndarray | None = None,
        reference_out: np.ndarray | None = None,
        fetched: bytearray | None = None,
    ) -> LoadedSample:
        """Read a sample into the first rows of the given buffers.

        Args:
            latents_out, reference_out: C-contiguous (rows, C) float16 or float32, to whose rows
                the arrays are cropped; made as float32 of the full length if None.
            fetched: the sample's bytes from ``fetch``.

        Raises:
            CorruptSampleError: what is stored is not what was indexed.
            InputError: the shard is gone or has changed.
        """
        layout = self._layout(sample)
        data = memoryview(fetched) if fetched is not None else self._read(sample, layout)
        # Written out: this is where a loader's time goes.
        (a, b), (c, d), (e, f) = layout.parts
        latents, reference, metadata = data[a:b], data[c:d], data[e:f]
        digest = xxhash.xxh3_64_intdigest
        hashes = (digest(latents), digest(reference), digest(metadata))
        if hashes != layout.hashes:
            first = next(i for i in range(3) if hashes[i] != layout.hashes[i])
            raise self._damaged(sample, PARTS[first])
        channels = self.latent_channels
        if latents_out is None:
            latents_out = np.empty((int(self.frames[sample]), channels), np.float32)
        if reference_out is None:
            reference_out = np.empty((int(self.reference_frames[sample]), channels), np.float32)
        return LoadedSample(
            fill(latents, layout.latents_item_bytes, latents_out),
            fill(reference, layout.reference_item_bytes, reference_out),
            json.loads(str(metadata, "utf-8")),
        )

    def read(
        self,
        sample: int,
        latents_out: np.ndarray | None = None,
        reference_out: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The arrays of a sample; see ``load``."""
        loaded = self.load(sample, latents_out, reference_out)
        return loaded.latents, loaded.reference

    def metadata(self, sample: int) -> dict[str, Any]:
        """The sample's JSON object; ``["text"]`` is always a string."""
        return self.metadata_of([sample])[0]

    def metadata_of(self, samples: Sequence[int]) -> list[dict[str, Any]]:
        """The JSON objects of many samples; what lies behind URLs is asked for at once."""
        layouts = [self._json_layout(sample) for sample in samples]
        extents = [self._extents(layout) for layout in layouts if self._remote[layout.shard]]
        fetched = iter(self._reader.fetch([e for (e,) in extents]) if self._reader else ())
        objects = []
        for sample, layout in zip(samples, layouts, strict=True):
            if self._remote[layout.shard]:
                data = memoryview(next(fetched))
            else:
                data = self._read(sample, layout)
            if xxhash.xxh3_64_intdigest(data) != layout.hashes[2]:
                raise self._damaged(sample, PARTS[2])
            objects.append(json.loads(str(data, "utf-8")))
        return objects

    def _json_layout(self, sample: int) -> SampleExtents:
        layout = self._layout(sample)
        start, stop = layout.parts[2]
        offset = int(self._rows["metadata_offset"][sample])
        return layout._replace(spans=[(offset, offset + stop - start)])

    def fetch(self, samples: Sequence[int]) -> dict[int, bytearray]:
        """The bytes of those samples that lie behind URLs, all asked for at once.

        Raises:
            InputError: a server that cannot be reached or whose tar has changed.
        """
        if self._reader is None:
            return {}
        wanted = [sample for sample in samples if self.is_remote(sample)]
        extents = [self._extents(self._layout(sample)) for sample in wanted]
        fetched = iter(self._reader.fetch([extent for group in extents for extent in group]))
        return {
            sample: bytearray().join(next(fetched) for _ in group)
            for sample, group in zip(wanted, extents, strict=True)
        }

    def forget(self, sample: int) -> None:
        """What the cache holds of a remote sample failed its check: the next fetch asks again."""
        assert self._reader is not None
        for extent in self._extents(self._layout(sample)):
            self._reader.forget(extent)

    def is_remote(self, sample: int) -> bool:
        return self._remote[int(self.shard[sample])]

    def _layout(self, sample: int) -> SampleExtents:
        return layout_of(self._rows[sample].item(), self.latent_channels)

    def _extents(self, layout: SampleExtents) -> list[Extent]:
        shard = layout.shard
        return [
            Extent(self.tar_paths[shard], self._tar_bytes[shard], self._tar_versions[shard], *span)
            for span in layout.spans
        ]

    def _read(self, sample: int, layout: SampleExtents) -> memoryview:
        """The joined bytes of the layout's spans, valid until this thread's next read."""
        if self._remote[layout.shard]:
            assert self._reader is not None
            return memoryview(bytearray().join(self._reader.fetch(self._extents(layout))))
        try:
            return self._files.read_spans(layout.shard, layout.spans)
        except OSError as error:
            raise CorruptSampleError(
                f"sample '{self.sample_id(sample)}': its shard {self.tar_paths[layout.shard]} "
                f"cannot be read there ({error.strerror}); restore the shard."
            ) from None

    def _damaged(self, sample: int, part: str) -> CorruptSampleError:
        return CorruptSampleError(
            f"sample '{self.sample_id(sample)}': its {part} in "
            f"{plain_name(self.tar_paths[int(self.shard[sample])])} is not what was indexed, so it was "
            "damaged since; restore the shard, or leave such samples out with data.on_error = "
            "'skip'."
        )
