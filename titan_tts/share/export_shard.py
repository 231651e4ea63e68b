"""Writes one file of an export. Called by name in processes, so all arguments are plain values."""

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
from titan_tts.share.parquet_file import write_parquet_file
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.shard_writer import add_member, metadata_bytes
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file
from torchtitan.models.dit_tts.infra.collectives import one_thread
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.sampling.sound_files import encoded

_AT_ONCE = 64  # samples that are requested together from a store
_MP3_BIT_RATE = 64_000


def write_shard(source: str, target: str, given: dict[str, Any], device: str) -> dict[str, Any]:
    """{"left_out": names of private columns}. `given`: options of the export, "split" and the codec's name."""
    left_out = set[str]()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    dataset = open_shards([source])
    if given["to"] == "parquet":
        _write_parquet(target, dataset, given["references"] == "drop", left_out)
    else:
        _write_audio(target, dataset, given, device, left_out)
    return {"left_out": sorted(left_out)}


def _write_parquet(target: str, dataset: Dataset, drop: bool, left_out: set[str]) -> None:
    size = None if drop else dataset.tar_bytes[0]
    rows = _rows(dataset, drop, left_out)
    write_parquet_file(target, rows, dataset.latent_channels, size)


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
        lengths = {name: int(getattr(dataset, name)[sample]) for name in members.length_columns()}
        if drop:
            if members.REFERENCE_PARTS in values:
                raise InputError(
                    f"--references drop, but the reference of {where} joins recordings, without which a speaker is lost; "
                    "keep the references"
                )
            lengths["reference_frames"] = 0
            public = _without_reference(public)
        arrays = [
            data if lengths[array.length] else b"" for array, data in zip(members.ARRAYS, arrays)
        ]
        if public != values:
            public.pop(members.HASHES_KEY, None)
            hashes = {
                array.suffix: xxhash.xxh3_64_hexdigest(data)
                for array, data in zip(members.ARRAYS, arrays)
            }
            metadata = metadata_bytes(where, public, hashes)
        columns = dict(zip((array.name for array in members.ARRAYS), arrays))
        yield {"key": dataset.key(sample), "metadata": str(metadata, "utf-8")} | lengths | columns


def _public(metadata: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Without private columns, whose names are added to `left_out`."""
    left_out.update(private := private_columns(metadata))
    return {name: value for name, value in metadata.items() if name not in private}


def _without_reference(metadata: dict[str, Any]) -> dict[str, Any]:
    """Without what tells of a stored reference, and without the hashes of what was stored."""
    left_out = {"reference_key", "reference_keys", members.REFERENCE_PARTS, members.HASHES_KEY}
    return {name: value for name, value in metadata.items() if name not in left_out}


def _waveform(codec: Codec, latents: np.ndarray, metadata: dict[str, Any]) -> torch.Tensor:
    """(samples,) of latents (T, C), without the padding of the last frame."""
    waveform = codec.decode(torch.from_numpy(latents)).cpu()
    samples = round(float(metadata.get("target_duration") or 0) * codec.sample_rate)
    is_of_last = 0 <= len(waveform) - samples < codec.hop_length
    return waveform[:samples] if is_of_last else waveform
