"""Writes one file of an export. Called by name in processes, so all arguments are plain values.

A Parquet file has a row per sample:

    key                        string
    frames, reference_frames   int32    rows of the arrays
    latents, reference         binary   float16 or float32 (rows, width), little-endian: KEY.npy behind its header
    metadata                   string   KEY.json
"""

import json
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from titan_tts.share.contents import open_shards, private_columns
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.shard_writer import add_member, metadata_bytes
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.files import atomic_file
from torchtitan.models.dit_tts.infra.collectives import one_thread
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.sampling.sound_files import encoded

_AT_ONCE = 64  # samples that are requested together from a store
_GROUP_BYTES = 32 << 20  # of rows that are in memory at once and become one row group
_MP3_BIT_RATE = 64_000


def write_shard(source: str, target: str, given: dict[str, Any], device: str) -> dict[str, Any]:
    """{"left_out": names of private columns}. `given`: options of the export, "split" and the codec's name."""
    left_out = set[str]()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    dataset = open_shards([source])
    if given["to"] == "parquet":
        write_parquet(target, _rows(dataset, given["references"] == "drop", left_out))
    else:
        _write_audio(target, dataset, given, device, left_out)
    return {"left_out": sorted(left_out)}


def write_parquet(target: str, rows: Iterator[dict[str, Any]]) -> None:
    import pyarrow  # takes long to import, and audio exports do not need it
    import pyarrow.parquet

    from titan_tts.prepare.formats.table import shard_schema

    schema = shard_schema()
    # Float16 latents hardly compress.
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with (
        atomic_file(target) as file,
        pyarrow.parquet.ParquetWriter(file, schema, **plain) as writer,
    ):
        group, size = list[dict[str, Any]](), 0
        for row in rows:
            group.append(row)
            size += sum(len(row[array.name]) for array in members.ARRAYS)
            if size >= _GROUP_BYTES:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group, size = [], 0
        if group:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


def _write_audio(
    target: str, dataset: Dataset, given: dict[str, Any], device: str, left_out: set[str]
) -> None:
    kind, codec = given["audio"], _codec(given["codec"], device)
    bit_rate = _MP3_BIT_RATE if kind == "mp3" else 0
    with (
        one_thread(),
        atomic_file(target) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for sample, fetched in _fetched(dataset):
            loaded = dataset.load(sample, fetched=fetched)
            metadata = _public(_without_reference(loaded.metadata), left_out)
            if given["split"]:
                metadata["split"] = given["split"]
            waveform = _waveform(codec, loaded.latents, metadata)
            audio = encoded(waveform, codec.sample_rate, kind, bit_rate)
            key = dataset.key(sample)
            add_member(tar, f"{key}.{kind}", audio)
            add_member(tar, f"{key}.json", members.canonical_json(metadata))


# A process's codec: its weights are loaded once, not for each shard.
_codec = lru_cache(maxsize=1)(build_codec)


def _fetched(dataset: Dataset) -> Iterator[tuple[int, bytearray | None]]:
    """All samples, with the bytes of those behind a URL."""
    for first in range(0, len(dataset), _AT_ONCE):
        samples = range(first, min(first + _AT_ONCE, len(dataset)))
        fetched = dataset.fetch(samples)
        yield from ((sample, fetched.get(sample)) for sample in samples)


def _rows(dataset: Dataset, drop: bool, left_out: set[str]) -> Iterator[dict[str, Any]]:
    """The columns of each sample. `left_out`: gets the names of private columns."""
    for sample, fetched in _fetched(dataset):
        *arrays, metadata = map(bytes, dataset.stored(sample, fetched))
        values = json.loads(metadata)
        public = _public(values, left_out)
        where = f"sample '{dataset.sample_id(sample)}'"
        row: dict[str, Any] = {
            name: int(getattr(dataset, name)[sample]) for name in members.length_columns()
        }
        if drop:
            require(
                members.REFERENCE_PARTS not in values,
                f"--references drop, but the reference of {where} joins recordings, without which a speaker is lost; keep "
                "the references",
            )
            row["reference_frames"] = 0
            public = _without_reference(public)
        hashes = {}
        for array, data in zip(members.ARRAYS, arrays, strict=True):
            row[array.name] = data if row[array.length] else b""
            hashes[array.suffix] = xxhash.xxh3_64_hexdigest(row[array.name])
        if public != values:
            public.pop(members.HASHES_KEY, None)
            metadata = metadata_bytes(where, public, hashes)
        yield {"key": dataset.key(sample), "metadata": str(metadata, "utf-8")} | row


def _public(metadata: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Without private columns, whose names are added to `left_out`."""
    left_out.update(private := private_columns(metadata))
    return {name: value for name, value in metadata.items() if name not in private}


def _without_reference(metadata: dict[str, Any]) -> dict[str, Any]:
    """Without what tells of a stored reference."""
    left_out = {"reference_key", "reference_keys", members.REFERENCE_PARTS}
    return {name: value for name, value in metadata.items() if name not in left_out}


def _waveform(codec: Codec, latents: np.ndarray, metadata: dict[str, Any]) -> torch.Tensor:
    """(samples,) of latents (T, C), without the padding of the last frame."""
    waveform = codec.decode(torch.from_numpy(latents)).cpu()
    samples = round(float(metadata.get("target_duration") or 0) * codec.sample_rate)
    is_of_last = 0 <= len(waveform) - samples < codec.hop_length
    return waveform[:samples] if is_of_last else waveform
