"""Open a dataset of shards and read any sample by offset.

>>> dataset = open_dataset("data/train")           # folder, .tar, glob, URL, or a list of these
>>> dataset.sample_id(0), int(dataset.frames[0])
('000000:utt0001', 113)
>>> latents, reference = dataset.read(0)           # float32 (113, 128), (R, 128)

`load` brings a sample's arrays and JSON with one read of the file: no tar parsing, no memory map (whose
resident size grows with all it ever touched), and a check of every byte against the hash in the index.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.extents import ExtentTable, SampleExtents, fill
from torchtitan.models.dit_tts.data.index import (
    ShardIndex,
    count_corrupt_samples,
    joined_labels,
    load_indexes,
)
from torchtitan.models.dit_tts.data.members import LABELS
from torchtitan.models.dit_tts.data.range_reader import Extent, RangeReader
from torchtitan.models.dit_tts.data.shard import Problem
from torchtitan.models.dit_tts.data.storage import (
    LocalSource,
    UnreadableError,
    find_shards,
    plain_name,
    shard_name,
    shard_names,
)
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote

# Below the usual limit of 1024 open files a process, with room for everything else.
MAX_OPEN_SHARDS = 256
# Without the checks of `json.loads`, which take as long as a sample's JSON: the index made them.
_decode_json = json.JSONDecoder().raw_decode
_LATENTS = slice(0, 1)  # of a sample's members


class CorruptSampleError(InputError):
    """A sample whose stored bytes are not those that were indexed."""


class LoadedSample(NamedTuple):
    """arrays: (rows, width), in the order of `members.ARRAYS`. metadata: the JSON's object."""

    arrays: list[np.ndarray]
    metadata: dict[str, Any]

    @property
    def latents(self) -> np.ndarray:
        return self.arrays[0]

    @property
    def reference(self) -> np.ndarray:
        return self.arrays[1]


class Fetched(NamedTuple):
    """Bytes of remote samples, and of the latents alone of others; None for those on a disk."""

    samples: dict[int, bytearray | None]
    latents: dict[int, bytearray | None]


def open_dataset(
    path: str | Sequence[str],
    latent_channels: int = 128,
    *,
    on_error: str = "raise",
    max_corrupt_fraction: float = 0.01,
    part: tuple[int, int] = (0, 1),
    verbatim: bool = False,
) -> "Dataset":
    """Open the shards at `path` (as of `find_shards`, or several) and make indexes where none are stored.

    Args:
        latent_channels: width C that the stored latents must have.
        on_error: "raise"; "skip" leaves corrupt samples out, and raises above `max_corrupt_fraction` of them; "report"
            leaves them out even if no sample is left.
        part: (number, count) of processes that start together: each begins with other shards, so that together they
            make every missing index about once. The first shows progress.
        verbatim: see `Dataset`.
    """
    entries = [path] if isinstance(path, str) else list(path) or [""]
    shards = list(map(find_shards, entries))
    tar_paths = [tar_path for of_entry in shards for tar_path in of_entry]
    sources = [number for number, of_entry in enumerate(shards) for _ in of_entry]
    name, count = Counter(map(plain_name, tar_paths)).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"[data] path names {name} twice; set [data] weights to draw it more often"
        )
    indexes = load_indexes(tar_paths, part)
    for tar_path, index in zip(tar_paths, indexes, strict=True):
        if len(index) and index.channels != latent_channels:
            raise InputError(
                f"{plain_name(tar_path)}: its latents are {index.channels} wide but [data] latent_channels "
                f"= {latent_channels}; set it to {index.channels} or use another dataset"
            )
    dataset = Dataset(tar_paths, indexes, sources, latent_channels, verbatim)
    _judge_problems(dataset, on_error, max_corrupt_fraction)
    return dataset


def _judge_problems(dataset: "Dataset", on_error: str, max_corrupt_fraction: float) -> None:
    assert on_error in ("raise", "skip", "report")
    if not dataset.problems or on_error == "report":
        return
    (tar_path, first), *others = dataset.problems
    more = f" ({len(others)} more: titan-tts data doctor lists them)" if others else ""
    sentence = f"{plain_name(tar_path)}: {first.sentence}{more}"
    if on_error == "raise":
        raise InputError(sentence)
    corrupt = dataset.corrupt_samples
    fraction = corrupt / (corrupt + len(dataset))
    if fraction > max_corrupt_fraction or not len(dataset):
        raise InputError(
            f"about {corrupt} corrupt samples and {len(dataset)} valid ones are {fraction:.1%}, more "
            f"than [data] max_corrupt_fraction = {max_corrupt_fraction:g} allows; the first: {sentence}"
        )


class Dataset:
    """All samples of some shards, numbered from 0 in order of shards and of members, for any thread.

    Columns, numpy arrays of one row per sample: `shard` (number of its shard), `source` (number of its entry of
    `[data] path`), `frames` and `reference_frames`, `text_bytes` and `text_chars` (length of the text in utf-8 and in
    code points), `latents_hash` (XXH3), `latents_item_bytes` (2 or 4) and `weight` (as of `weight_of`).

    Attributes:
        verbatim: whether a sample's verbatim text may stand in for its text: then lengths and characters are
            the larger of both, and the characters of both.
        digests: of each shard's contents, SHA-256.
        characters: the distinct characters of all texts, in ascending order.
        problems: (tar path, problem) of all that the indexes leave out.
        corrupt_samples: how many samples that are, as `count_corrupt_samples` estimates.
        shard_names: of each shard as `sample_id` has it.
        fingerprint: of names and contents, of no times and no folders.
    """

    def __init__(
        self,
        tar_paths: Sequence[str],
        indexes: Sequence[ShardIndex],
        sources: Sequence[int],
        latent_channels: int,
        verbatim: bool = False,
    ):
        self.tar_paths = list(tar_paths)
        self.latent_channels = latent_channels
        self.shard_names = shard_names(self.tar_paths)
        lengths = [len(index) for index in indexes]
        self._first = [0, *np.cumsum(lengths).tolist()]
        self.shard = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        self.source = np.repeat(np.asarray(sources, dtype=np.int32), lengths)

        def column(name: str) -> np.ndarray:
            return np.concatenate([index.columns[name] for index in indexes])

        # The indexes themselves are not kept: a million samples are 95 MB in each process.
        self._extents = ExtentTable(column, latent_channels)
        self.frames, self.reference_frames = column("frames"), column("reference_frames")
        self.text_bytes, self.text_chars = column("text_bytes"), column("text_chars")
        self.verbatim = verbatim
        if verbatim:
            self.text_bytes = np.maximum(self.text_bytes, column("verbatim_bytes"))
            self.text_chars = np.maximum(self.text_chars, column("verbatim_chars"))
        self.weight = column("weight")
        self.latents_hash = self._extents.rows["latents_hash"]
        self.latents_item_bytes = self._extents.rows["latents_item_bytes"]
        self._keys, self._key_end = [index.keys for index in indexes], column("key_end")
        self.tar_bytes = [index.tar_bytes for index in indexes]
        self._tar_versions = [index.tar_version for index in indexes]
        self._remote = [is_remote(tar_path) for tar_path in tar_paths]
        self._reader = RangeReader() if any(self._remote) else None
        # A file closes itself when its last reader lets go of it.
        self._file = lru_cache(MAX_OPEN_SHARDS)(self._open)
        self._labels = {name: joined_labels(indexes, name) for name in LABELS}
        texts = [index.characters for index in indexes]
        texts += [index.verbatim_characters for index in indexes if verbatim]
        self.characters = "".join(sorted(set().union(*texts)))
        self.problems: list[tuple[str, Problem]] = [
            (tar_path, problem)
            for tar_path, index in zip(tar_paths, indexes, strict=True)
            for problem in index.problems
        ]
        self.corrupt_samples = count_corrupt_samples(indexes)
        self.digests = [index.digest for index in indexes]
        digest = hashlib.sha256()
        for tar_path, shard_digest in zip(tar_paths, self.digests, strict=True):
            name = shard_name(tar_path).encode("utf-8", "surrogateescape")
            digest.update(name + b"\0" + shard_digest)
        self.fingerprint: str = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.frames)

    def labels(self, name: str) -> tuple[np.ndarray, list[str]]:
        """(code of each sample (n,) int32, value of each code): -1 where the JSON has none. `name`:
        one of `LABELS`.
        """
        return self._labels[name]

    def key(self, sample: int) -> str:
        """The sample's name within its shard."""
        shard = int(self.shard[sample])
        start = int(self._key_end[sample - 1]) if sample > self._first[shard] else 0
        return self._keys[shard][start : int(self._key_end[sample])].decode("utf-8")

    def sample_id(self, sample: int) -> str:
        """`shard:key`, the shard being the file's name without `.tar`, behind as many of its folders as tell it from
        others of that name."""
        return f"{self.shard_names[int(self.shard[sample])]}:{self.key(sample)}"

    def load(
        self,
        sample: int,
        out: Sequence[np.ndarray] | None = None,
        fetched: bytearray | None = None,
        crop: int = 0,
    ) -> LoadedSample:
        """Read a sample into the first rows of the given buffers.

        Args:
            out: for each array, C-contiguous (rows, width) float16 or float32, to whose rows it is
                cropped; None: float32 of the full length.
            fetched: the sample's bytes from `fetch`.
            crop: which rows of a reference that is cropped are read, as in `fill`; of other arrays the first.

        Raises:
            CorruptSampleError: the stored bytes are not those that were indexed.
        """
        extents = self._extents.of(sample)
        stored = self._stored(sample, extents, fetched)
        arrays = []
        for number, (member, item_bytes) in enumerate(zip(members.ARRAYS, extents.item_bytes)):
            if out is None:
                width = member.width or self.latent_channels
                rows = len(stored[number]) // (width * item_bytes)
                target = np.empty((rows, width), np.float32)
            else:
                target = out[number]
            start = crop if member.length == "reference_frames" else 0
            arrays.append(fill(stored[number], item_bytes, target, start))
        return LoadedSample(arrays, self._decoded(sample, stored[-1]))

    def load_latents(
        self, sample: int, out: np.ndarray, start: int, fetched: bytearray | None = None
    ) -> None:
        """Fill `out` (n, C), as in `load`, with the sample's latents from frame `start` on, of which there
        are at least n. `fetched`: the latents' bytes from `fetch`."""
        extents = self._extents.of(sample, _LATENTS)
        (stored,) = self._stored(sample, extents, fetched)
        fill(stored, extents.item_bytes[0], out, start)

    def stored(self, sample: int, fetched: bytearray | None = None) -> list[memoryview]:
        """The bytes of a sample as they lie in its shard: of its arrays, then of its JSON. `fetched` as in `load`."""
        return self._stored(sample, self._extents.of(sample), fetched)

    def read(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Latents and reference of a sample; see `load`."""
        loaded = self.load(sample)
        return loaded.latents, loaded.reference

    def metadata(self, sample: int) -> dict[str, Any]:
        """The sample's JSON object; `["text"]` is always a string."""
        return self.metadata_of([sample])[0]

    def metadata_of(self, samples: Sequence[int]) -> list[dict[str, Any]]:
        """The JSON objects of many samples; remote ones are requested all at once."""
        json_alone = slice(len(members.ARRAYS), None)
        wanted = [(sample, self._extents.of(sample, json_alone)) for sample in samples]
        objects = []
        for (sample, extents), fetched in zip(wanted, self._fetch(wanted)):
            (stored,) = self._stored(sample, extents, fetched)
            objects.append(self._decoded(sample, stored))
        return objects

    def fetch(self, samples: Sequence[int] | np.ndarray, latents_of: Sequence[int] = ()) -> Fetched:
        """The bytes of those samples that lie behind URLs, and the latents alone of further ones, all requested at
        once."""
        if self._reader is None:
            return Fetched({}, {})
        wanted = [(int(sample), self._extents.of(int(sample))) for sample in samples]
        wanted += [(sample, self._extents.of(sample, _LATENTS)) for sample in latents_of]
        found = [(sample, data) for (sample, _), data in zip(wanted, self._fetch(wanted))]
        return Fetched(dict(found[: len(samples)]), dict(found[len(samples) :]))

    def _fetch(self, wanted: Sequence[tuple[int, SampleExtents]]) -> list[bytearray | None]:
        """The joined bytes of remote samples, all requested at once; None for a local one."""
        if self._reader is None:
            return [None] * len(wanted)
        extents = [self._remote_extents(sample, extents) for sample, extents in wanted]
        found = iter(self._reader.fetch([each for of_sample in extents for each in of_sample]))
        return [
            bytearray().join(next(found) for _ in of_sample) if of_sample else None
            for of_sample in extents
        ]

    def _remote_extents(self, sample: int, extents: SampleExtents) -> list[Extent]:
        shard = self.shard[sample]
        if not self._remote[shard]:
            return []
        tar = self.tar_paths[shard], self.tar_bytes[shard], self._tar_versions[shard]
        return [Extent(*tar, *span) for span in extents.spans]

    def _read(self, sample: int, extents: SampleExtents) -> bytearray:
        """The joined bytes of the spans."""
        (fetched,) = self._fetch([(sample, extents)])
        if fetched is not None:
            return fetched
        file = self._file(int(self.shard[sample]))
        try:
            return bytearray().join(
                file.pread(stop - start, start) for start, stop in extents.spans
            )
        except UnreadableError as error:
            raise self._corrupt(sample, "bytes", f"are unreadable: {error}") from None

    def _open(self, shard: int) -> LocalSource:
        file, expected = LocalSource(self.tar_paths[shard]), self.tar_bytes[shard]
        if file.size != expected:
            raise InputError(
                f"{file.path}: has {file.size} bytes, but its index was made from {expected}; shards "
                "must not change during a run, so start again"
            )
        if hasattr(os, "posix_fadvise"):
            # Samples are read in random order, so reading ahead would be wasted.
            os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return file

    def _stored(
        self, sample: int, extents: SampleExtents, fetched: bytearray | None
    ) -> list[memoryview]:
        """The bytes of each member, from `fetched` or where they lie."""
        try:
            return self._checked(sample, extents, fetched or self._read(sample, extents))
        except CorruptSampleError:
            if self._reader is None or not self._remote[self.shard[sample]]:
                raise
        # Perhaps they were corrupted on the way here: once more, from their origin.
        self._reader.suspect(self.tar_paths[self.shard[sample]])
        return self._checked(sample, extents, self._read(sample, extents))

    def _checked(self, sample: int, extents: SampleExtents, data: bytearray) -> list[memoryview]:
        stored = [memoryview(data)[start:stop] for start, stop in extents.parts]
        hashes = tuple(map(xxhash.xxh3_64_intdigest, stored))
        if hashes == extents.hashes:
            return stored
        is_corrupt = list(map(int.__ne__, hashes, extents.hashes))
        arrays = members.ARRAYS[: len(extents.item_bytes)]
        name = [*(member.name for member in arrays), "JSON"][is_corrupt.index(True)]
        raise self._corrupt(
            sample,
            name,
            "changed after indexing, so it is corrupt; restore the shard, or leave such samples out with "
            "[data] on_error = 'skip'",
        )

    def _decoded(self, sample: int, stored: memoryview) -> dict[str, Any]:
        try:
            found = _decode_json(str(stored, "utf-8").lstrip())[0]
            assert isinstance(found["text"], str)
            return found
        except (ValueError, LookupError, TypeError, AssertionError, RecursionError):
            raise self._corrupt(
                sample, "JSON", "has no text, though the index says so; remove the shard's .idx"
            ) from None

    def _corrupt(self, sample: int, name: str, what: str) -> CorruptSampleError:
        tar_path = plain_name(self.tar_paths[self.shard[sample]])
        return CorruptSampleError(
            f"sample '{self.sample_id(sample)}': its {name} in {tar_path} {what}"
        )


def open_training_data(data: Data, part: tuple[int, int] = (0, 1)) -> Dataset:
    """The dataset that `[data]` names; `part` as in `open_dataset`."""
    return open_dataset(
        data.path,
        data.latent_channels,
        on_error=data.on_error,
        max_corrupt_fraction=data.max_corrupt_fraction,
        part=part,
        verbatim=data.verbatim_fraction > 0,
    )
