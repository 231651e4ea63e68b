"""A frozen text encoder's features of every text, kept in files: found, checked, read by sample.

    train/000000.tar
    train/text_features/t5gemma-2-270m-270m-3f2a0d6c1b5e4789/000000.safetensors

One file a shard, see feature_file.py. The folder's name ends in a key of what the features were made
with, so that several encoders' lie beside each other. Of shards behind URLs and in folders that cannot
be written the files are in the user's cache folder, under the shards' contents. Features that some
other state of the same encoder made are an error: training on them, or making all of them anew, would
be as wrong as likely.

They are of the text alone. Conditioning tokens do not go through the encoder, so that dropping or
changing them leaves the features as they are.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash

from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset, shard_name
from torchtitan.models.dit_tts.data.local_reader import LocalFiles
from torchtitan.models.dit_tts.data.storage import plain_name
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote, user_cache_folder
from torchtitan.models.dit_tts.text.feature_store import (
    SUFFIX,
    FeatureFile,
    FeatureKind,
    read_feature_file,
)

FOLDER_NAME = "text_features"

SETTLE_SECONDS = 60
"""after which a network file system shows every machine what others wrote"""

# Threads that wait on a disk while the files' tables are read.
_OPENERS = 8
# What a read needs of a sample, in one look-up.
_ROW = np.dtype([("shard", "<i4"), ("rows", "<i4"), ("offset", "<i8"), ("hash", "<u8")])


@dataclass(frozen=True)
class Place:
    """Where feature files of a shard may lie."""

    folder: str
    """of all kinds"""

    name: str
    """of the file, without its folder of one kind"""

    shard: str
    """name of the shard, for messages"""

    def path(self, kind: FeatureKind) -> str:
        return os.path.join(self.folder, kind.folder_name, self.name)


def places(tar_path: str, shard_digest: str) -> list[Place]:
    """Where a shard's features are looked for and, the first that can be written, put."""
    name, said = shard_name(tar_path) + SUFFIX, plain_name(tar_path)
    found = []
    if not is_remote(tar_path):
        found.append(Place(os.path.join(os.path.dirname(tar_path), FOLDER_NAME), name, said))
    # Other shards have the same name; the digest tells them apart wherever they come to lie.
    cached = f"{shard_digest[:20]}-{name[-100:]}"
    return [*found, Place(user_cache_folder(FOLDER_NAME), cached, said)]


def find_feature_files(
    dataset: Dataset, kind: FeatureKind, wait_seconds: int = 0
) -> list[FeatureFile | None]:
    """Each shard's features; None where they are still to be made.

    Without the encoder's fingerprint, what the files say is taken, if all say the same.

    Args:
        wait_seconds: for which to look again while files are missing that other machines have made.

    Raises:
        InputError: features of this encoder that another state of it, another tokenizer or another
            shard of the name has made.
    """
    shards = range(len(dataset.tar_paths))
    with ThreadPoolExecutor(_OPENERS, thread_name_prefix="features") as pool:
        for waited in range(wait_seconds + 1):
            if waited:
                time.sleep(1)
            folders = _FolderNames()
            files = list(pool.map(lambda shard: _find(dataset, shard, kind, folders), shards))
            if None not in files:
                break
    _refuse_several_encoders([file for file in files if file is not None])
    return files


def find_feature_file(dataset: Dataset, shard: int, kind: FeatureKind) -> FeatureFile | None:
    """As `find_feature_files`, of one shard."""
    return _find(dataset, shard, kind, _FolderNames())


def _find(
    dataset: Dataset, shard: int, kind: FeatureKind, folders: "_FolderNames"
) -> FeatureFile | None:
    digest = dataset.shard_digests[shard]
    for place in places(dataset.tar_paths[shard], digest):
        found = _find_at(place, kind, digest, folders)
        if found is not None:
            return found
    return None


def missing_shards(files: Sequence[FeatureFile | None]) -> list[int]:
    """Numbers of the shards whose features are still to be made."""
    return [shard for shard, file in enumerate(files) if file is None]


def say_missing(dataset: Dataset, kind: FeatureKind, missing: Sequence[int]) -> str:
    """The beginning of a sentence about shards without features."""
    return (
        f"text features of {kind.model!r} are missing for {len(missing)} of "
        f"{len(dataset.tar_paths)} shards, the first is {plain_name(dataset.tar_paths[missing[0]])}"
    )


class _FolderNames:
    """Names in folders, each listed once: a dataset's shards share one."""

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}

    def below(self, folder: str) -> list[str]:
        names = self._known.get(folder)
        if names is None:
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                names = []
            self._known[folder] = names
        return names


def _find_at(
    place: Place, kind: FeatureKind, shard_digest: str, folders: _FolderNames
) -> FeatureFile | None:
    if kind.encoder_fingerprint is not None:
        found = read_feature_file(place.path(kind))
        if found is not None:
            _check_shard(found, place, shard_digest)
            return found
    others = list(_others(place, kind, folders))
    fitting = [found for found in others if found.kind.model == kind.model]
    if kind.encoder_fingerprint is None and not fitting:
        # A model's folder may lie elsewhere than where the features were made.
        fitting = [
            found for found in others if found.kind.text_fingerprint == kind.text_fingerprint
        ]
    for found in fitting:
        _check_made_with(found, kind)
        _check_shard(found, place, shard_digest)
    _refuse_several_encoders(fitting)
    return fitting[0] if fitting else None


def _others(place: Place, kind: FeatureKind, folders: _FolderNames) -> Iterator[FeatureFile]:
    """The shard's features in the same precisions by models of the same last name, in whatever state."""
    for name in folders.below(place.folder):
        if name.startswith(kind.slug + "-"):
            found = read_feature_file(os.path.join(place.folder, name, place.name))
            same = found is not None and (
                (found.kind.slug, found.kind.encoder_dtype, found.kind.stored_dtype)
                == (kind.slug, kind.encoder_dtype, kind.stored_dtype)
            )
            if same:
                yield found


def _check_made_with(found: FeatureFile, kind: FeatureKind) -> None:
    for what, had, wanted in (
        ("encoder weights", found.kind.encoder_fingerprint, kind.encoder_fingerprint),
        ("tokenizer", found.kind.text_fingerprint, kind.text_fingerprint),
    ):
        if wanted is not None and had != wanted:
            raise InputError(
                f"{found.path}: text features of {kind.model!r} that were made with other {what} "
                f"(fingerprint {had}, [encoder] model has {wanted} now); restore the model, or delete "
                f"{os.path.dirname(found.path)} and the features are made anew"
            )


def _check_shard(found: FeatureFile, place: Place, shard_digest: str) -> None:
    if found.shard_digest != shard_digest:
        raise InputError(
            f"{found.path}: text features of another {place.shard} (its digest was "
            f"{found.shard_digest[:16]}, is {shard_digest[:16]}); restore the shard, or delete the file "
            f"and it is made anew"
        )


def _refuse_several_encoders(files: Sequence[FeatureFile]) -> None:
    for file in files:
        if file.kind.encoder_fingerprint != files[0].kind.encoder_fingerprint:
            raise InputError(
                f"{file.path} and {files[0].path}: text features by two states of the encoder "
                f"{file.kind.model!r} (fingerprints {file.kind.encoder_fingerprint} and "
                f"{files[0].kind.encoder_fingerprint}); delete the folder of the wrong one"
            )


def open_text_features(dataset: Dataset, kind: FeatureKind) -> "TextFeatures":
    """The features of all texts of a dataset.

    Raises:
        InputError: as `find_feature_files`, or files that are missing.
    """
    files = find_feature_files(dataset, kind)
    missing = missing_shards(files)
    if missing:
        raise InputError(
            f"{say_missing(dataset, kind, missing)}; make them with [encoder] cache_features = true where the "
            f"encoder's weights are, or with titan-tts prepare --encode-text"
        )
    return TextFeatures(dataset, [file for file in files if file is not None])


class TextFeatures:
    """Features of every sample of a dataset, read from any thread.

    Attributes:
        width: h.
        torch_dtype: of the stored features.
        tokens: (n,) int32, ids of each sample's text.
        encoder_fingerprint: of the encoder that made them.
        kind: all that they were made with.
    """

    def __init__(self, dataset: Dataset, files: Sequence[FeatureFile]):
        """files: of each shard, in the dataset's order."""
        for file, digest in zip(files, dataset.shard_digests, strict=True):
            assert file.shard_digest == digest and file.width == files[0].width
        self._dataset = dataset
        self.kind = files[0].kind
        self.width = files[0].width
        self.torch_dtype = self.kind.torch_dtype
        self.encoder_fingerprint = self.kind.encoder_fingerprint
        self._row_bytes = files[0].row_bytes
        self.tokens = np.concatenate([file.tokens for file in files])
        self._rows = np.empty(len(self.tokens), _ROW)
        self._rows["shard"] = dataset.shard
        self._rows["hash"] = np.concatenate([file.hashes for file in files])
        starts = [np.concatenate([[0], file.ends[:-1]]) for file in files if len(file.ends)]
        offsets = np.array([file.features_offset for file in files], np.int64)[dataset.shard]
        self._rows["offset"] = offsets + np.concatenate(starts) * self._row_bytes
        ends = np.concatenate([file.ends for file in files])
        self._rows["rows"] = ends - np.concatenate(starts)
        self._paths = [file.path for file in files]
        self._files = LocalFiles(self._paths, [file.bytes for file in files])

    def read(self, sample: int, out: np.ndarray) -> int:
        """Fills the first rows of `out` with a sample's features and leaves the rest as it is.

        Args:
            out: (L, h), C-contiguous; items as wide as the stored dtype's, whose bits they get.

        Returns:
            The number of rows.

        Raises:
            CorruptSampleError: what is stored is not what was written, or was never made.
            InputError: more rows than `out` has, or the file is gone or has changed.
        """
        shard, rows, offset, stored_hash = self._rows[sample].item()
        if not stored_hash:
            raise self._damaged(
                sample,
                shard,
                "are left out, as its text was damaged or too long when they were made",
            )
        if rows > len(out):
            raise InputError(
                f"sample '{self._dataset.sample_id(sample)}': its text has {rows} features where at "
                f"most {len(out)} fit"
            )
        assert out.shape[1] * out.itemsize == self._row_bytes
        target = memoryview(out[:rows].reshape(-1).view(np.uint8))
        try:
            self._files.read_into(shard, target, offset)
        except OSError as error:
            raise self._damaged(sample, shard, f"cannot be read ({error.strerror})") from None
        if xxhash.xxh3_64_intdigest(target) != stored_hash:
            raise self._damaged(
                sample, shard, "are not what was written, so they were damaged since"
            )
        return rows

    def _damaged(self, sample: int, shard: int, how: str) -> CorruptSampleError:
        return CorruptSampleError(
            f"sample '{self._dataset.sample_id(sample)}': its text features in {self._paths[shard]} "
            f"{how}; delete the file, and the next start makes it anew, or leave such samples out with "
            f"data.on_error = 'skip'."
        )
