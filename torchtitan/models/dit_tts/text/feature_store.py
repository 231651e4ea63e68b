"""Features of a frozen text encoder on disk: one safetensors file per shard.

    train/000000.tar
    train/text_features/t5gemma-2-270m-270m-3f2a0d6c1b5e4789/000000.safetensors

    hashes    (n,) uint64   XXH3 of the bytes of each sample's features; 0 without features
    tokens    (n,) int32    tokens of each sample's text
    features  (rows, h)     the encoder's last hidden states, text after text

The n samples are in the order of the shard's index. The folder's name ends in a key of everything that the
features depend on, so several encoders can have features of one shard.

Features depend on the text alone. Conditioning tokens do not go through the encoder, so the files stay
valid when conditions are dropped or changed.
"""

import glob
import json
import os
import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import xxhash

from torchtitan.models.dit_tts.bounded import check_regular, parse_json
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset, shard_name
from torchtitan.models.dit_tts.data.local_reader import LocalFiles
from torchtitan.models.dit_tts.data.storage import plain_name
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import fingerprint, is_remote, write_atomic
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec
from torchtitan.models.dit_tts.text.hf_files import weight_files
from torchtitan.models.dit_tts.text.hf_tokenizer import SubwordTokenizer

LONGEST_TEXT = 2048
"""tokens; a longer text has no features, as attention over one long text would need all memory"""

FORMAT_VERSION = 2
FOLDER_NAME = "text_features"
SUFFIX = ".safetensors"

# Threads that wait for a disk while the tables of many files are read.
_OPENERS = 8
_MAX_SLUG = 80
_METADATA = "titan_tts"
# What `TextFeatures.read` needs, in one look-up.
_ROW = np.dtype([("shard", "<i4"), ("rows", "<i4"), ("offset", "<i8"), ("hash", "<u8")])


@dataclass(frozen=True)
class FeatureKind:
    """Everything that features depend on, except the texts."""

    model: str
    """as `HFEncoderSpec.model`"""

    encoder_fingerprint: str | None
    """of the encoder's config, weights and precision; None: the weights are not on this machine"""

    text_fingerprint: str
    """of the encoder's tokenizer"""

    encoder_dtype: str
    """precision in which the encoder computes"""

    stored_dtype: str
    """precision of the features: float32, bfloat16 or float16"""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.stored_dtype)

    @property
    def slug(self) -> str:
        """The beginning of every folder name with features of this model."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(self.model)).lstrip(".-")
        return name[:_MAX_SLUG] or "encoder"

    @property
    def folder_name(self) -> str:
        assert self.encoder_fingerprint is not None
        parts = (self.encoder_fingerprint, self.text_fingerprint, self.stored_dtype)
        return f"{self.slug}-{fingerprint(str(FORMAT_VERSION), *parts)}"


@dataclass(frozen=True)
class FeatureFile:
    """A feature file without its features, whose rows `TextFeatures` reads."""

    path: str
    bytes: int
    kind: FeatureKind
    shard_digest: str
    width: int
    features_offset: int
    """of the first row, in bytes from the start of the file"""

    tokens: np.ndarray
    hashes: np.ndarray


def feature_kind(
    encoder: Encoder, tokenizer: SubwordTokenizer, source: HFEncoderSpec
) -> FeatureKind:
    """The features that [encoder] asks for; without a fingerprint where the weights are not here."""
    fingerprint = source.fingerprint(encoder.dtype) if weight_files(source.model) else None
    return FeatureKind(
        source.model,
        fingerprint,
        tokenizer.text_fingerprint,
        encoder.dtype,
        encoder.cache_dtype or encoder.dtype,
    )


def longest_text(source: HFEncoderSpec) -> int:
    """Tokens of the longest text that is encoded."""
    return min(LONGEST_TEXT, source.max_tokens or LONGEST_TEXT)


def write_feature_file(
    path: str,
    kind: FeatureKind,
    shard_digest: str,
    tokens: np.ndarray,
    features: Sequence[torch.Tensor | None],
    width: int,
) -> None:
    """Writes a feature file, which appears under `path` complete or not at all.

    Args:
        tokens: (n,) int32 tokens of each sample's text.
        features: n, of each sample (tokens, h) in the stored dtype on the CPU, or None.
        width: h.
    """
    from safetensors.torch import save

    hashes = np.zeros(len(tokens), np.uint64)
    for sample, each in enumerate(features):
        if each is not None:  # numpy has no bfloat16
            hashes[sample] = xxhash.xxh3_64_intdigest(each.view(torch.uint8).numpy().data)
    rows = [each for each in features if each is not None]
    tables = {
        "hashes": torch.from_numpy(hashes),
        "tokens": torch.from_numpy(tokens),
        "features": torch.cat([torch.empty(0, width, dtype=kind.torch_dtype), *rows]),
    }
    record = {
        "version": FORMAT_VERSION,
        "kind": asdict(kind),
        "shard_digest": shard_digest,
        "tables_hash": _tables_hash(kind, shard_digest, width, tokens, hashes),
    }
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_atomic(path, save(tables, {_METADATA: json.dumps(record)}))


def _tables_hash(
    kind: FeatureKind, shard_digest: str, width: int, tokens: np.ndarray, hashes: np.ndarray
) -> str:
    """Covers all of a file but the features, which have hashes of their own."""
    header = json.dumps([asdict(kind), shard_digest, width]).encode()
    return xxhash.xxh3_64_hexdigest(header + tokens.tobytes() + hashes.tobytes())


def read_feature_file(path: str) -> FeatureFile | None:
    """The tables of a feature file; None where there is no complete and valid one of this version."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, "np") as file:  # checks that the header fits the file's size
            record = parse_json(file.metadata()[_METADATA])
            tokens, hashes = file.get_tensor("tokens"), file.get_tensor("hashes")
            width = file.get_slice("features").get_shape()[1]
        if record["version"] != FORMAT_VERSION:
            return None
        kind, digest = FeatureKind(**record["kind"]), record["shard_digest"]
        if _tables_hash(kind, digest, width, tokens, hashes) != record["tables_hash"]:
            return None
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            start = parse_json(stream.read(length))["features"]["data_offsets"][0]
        offset = 8 + length + start
        return FeatureFile(path, os.path.getsize(path), kind, digest, width, offset, tokens, hashes)
    except (FileNotFoundError, SafetensorError, LookupError, TypeError, ValueError):
        return None


def feature_path(tar_path: str, folder_name: str) -> str:
    """The file of a shard's features of one kind."""
    parts = os.path.dirname(tar_path), FOLDER_NAME, folder_name, shard_name(tar_path) + SUFFIX
    return os.path.join(*parts)


def with_stored_fingerprint(dataset: Dataset, kind: FeatureKind) -> FeatureKind:
    """`kind` with the encoder's fingerprint from stored features, where the weights are not here."""
    if kind.encoder_fingerprint is not None:
        return kind
    for tar_path in dataset.tar_paths:
        found: dict[str | None, str] = {}
        folder = os.path.join(os.path.dirname(tar_path), FOLDER_NAME)
        for subfolder in sorted(glob.glob(f"{kind.slug}-*", root_dir=folder)):
            file = read_feature_file(feature_path(tar_path, subfolder))
            if file is None or file.kind.slug != kind.slug:
                continue
            # Whatever the model's full path, as its folder may have been elsewhere.
            if replace(file.kind, model=kind.model, encoder_fingerprint=None) == kind:
                found.setdefault(file.kind.encoder_fingerprint, file.path)
        if len(found) > 1:
            paths = " and ".join(found.values())
            raise InputError(
                f"{paths}: text features of two versions of the encoder {kind.model!r}, whose weights are "
                f"not on this machine; delete the folder of the wrong one"
            )
        if found:
            return replace(kind, encoder_fingerprint=next(iter(found)))
    return kind


def find_feature_file(dataset: Dataset, shard: int, kind: FeatureKind) -> FeatureFile | None:
    """The features of one shard; None where they are still to be made."""
    if kind.encoder_fingerprint is None:
        return None
    file = read_feature_file(feature_path(dataset.tar_paths[shard], kind.folder_name))
    digest = dataset.digests[shard].hex()
    fits = file and file.kind.folder_name == kind.folder_name and file.shard_digest == digest
    return file if fits else None


def find_feature_files(dataset: Dataset, kind: FeatureKind) -> list[FeatureFile | None]:
    """The features of each shard; None where they are still to be made."""
    with ThreadPoolExecutor(_OPENERS, thread_name_prefix="features") as pool:
        shards = range(len(dataset.tar_paths))
        return list(pool.map(lambda shard: find_feature_file(dataset, shard, kind), shards))


def open_text_features(dataset: Dataset, kind: FeatureKind) -> "TextFeatures":
    """The features of all texts of a dataset."""
    for tar_path in dataset.tar_paths:
        require(
            not is_remote(tar_path),
            f"{plain_name(tar_path)}: text features are read beside shards on this machine; copy the shards here, or set "
            f"[encoder] cache_features = false",
        )
    files = find_feature_files(dataset, kind)
    if None in files:
        raise InputError(
            f"text features of {kind.model!r} are missing for {files.count(None)} of {len(files)} shards, the first is "
            f"{dataset.tar_paths[files.index(None)]}; make them with "
            f"titan-tts prepare SOURCE OUTPUT --encode-text {shlex.quote(kind.model)} --text-dtype {kind.encoder_dtype} "
            f"--text-feature-dtype {kind.stored_dtype} and the other options of the preparation, or set "
            f"[encoder] cache_features = false"
        )
    return TextFeatures(dataset, [file for file in files if file is not None])


class TextFeatures:
    """Features of every sample of a dataset, read from any thread.

    Attributes:
        width: h.
        tokens: (n,) int32 tokens of each sample's text.
        encoder_fingerprint: of the encoder that made them.
    """

    def __init__(self, dataset: Dataset, files: Sequence[FeatureFile]):
        """files: of each shard, in the dataset's order."""
        self._dataset = dataset
        kind, self.width = files[0].kind, files[0].width
        self.torch_dtype = kind.torch_dtype
        assert kind.encoder_fingerprint is not None
        self.encoder_fingerprint = kind.encoder_fingerprint
        self._row_bytes = self.width * self.torch_dtype.itemsize
        self.tokens = np.concatenate([file.tokens for file in files])
        self._rows = np.empty(len(self.tokens), _ROW)
        self._rows["shard"] = dataset.shard
        self._rows["hash"] = np.concatenate([file.hashes for file in files])
        rows = [np.where(file.hashes != 0, file.tokens, 0) for file in files]
        self._rows["rows"] = np.concatenate(rows)
        self._rows["offset"] = np.concatenate(
            [
                file.features_offset + (np.cumsum(of_file) - of_file) * self._row_bytes
                for file, of_file in zip(files, rows, strict=True)
            ]
        )
        self._paths = [file.path for file in files]
        self._files = LocalFiles(self._paths, [file.bytes for file in files])

    def read(self, sample: int, out: np.ndarray) -> int:
        """Fills the first rows of `out` with a sample's features and leaves the rest as it is.

        Args:
            out: (L, h), C-contiguous; items as wide as the stored dtype's, whose bits they get.

        Raises:
            CorruptSampleError: the bytes changed since they were written, or were never made.
        """
        shard, rows, offset, stored_hash = self._rows[sample].item()
        if not stored_hash:
            raise self._corrupt(
                sample, shard, "are left out, as its text is too long to be encoded"
            )
        if rows > len(out):
            raise InputError(
                f"sample '{self._dataset.sample_id(sample)}': its text has {rows} features, but "
                f"at most {len(out)} fit"
            )
        assert out.shape[1] * out.itemsize == self._row_bytes
        target = out[:rows].reshape(-1).view(np.uint8).data
        try:
            self._files.read_into(shard, target, offset)
        except OSError as error:
            raise self._corrupt(sample, shard, f"cannot be read ({error.strerror})") from None
        if xxhash.xxh3_64_intdigest(target) != stored_hash:
            raise self._corrupt(sample, shard, "differ from what was written")
        return rows

    def _corrupt(self, sample: int, shard: int, how: str) -> CorruptSampleError:
        return CorruptSampleError(
            f"sample '{self._dataset.sample_id(sample)}': its text features in {self._paths[shard]} "
            f"{how}; delete the file and make it again with titan-tts prepare --encode-text, or leave such "
            f"samples out with [data] on_error = 'skip'"
        )
