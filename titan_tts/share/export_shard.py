"""Writes one file of an export. Called by name in processes, so all arguments are plain values.

A Parquet file has a row per sample:

    key                        string
    frames, reference_frames   int32    rows of the arrays
    latents, reference         binary   float16 or float32 (rows, width), little-endian: KEY.npy behind its header
    metadata                   string   KEY.json without the hashes
"""

import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.dataset import Dataset, open_dataset
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.data.shard_writer import add_member
from torchtitan.models.dit_tts.errors import without_secrets
from torchtitan.models.dit_tts.files import atomic_file
from torchtitan.models.dit_tts.infra.collectives import one_thread
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.sampling.sound_files import encoded

_GROUP_BYTES = 32 << 20  # of rows that are in memory at once and become one row group
_MP3_BIT_RATE = 64_000
# A string in JSON; not the phonemes "/a/".
_ABSOLUTE_PATH = re.compile(
    r'(?<!\\)"((file:|~)?/([^"/]+"|[^"]+/[^"]+")|[A-Za-z]:(/|\\\\)|\\\\\\\\)'
)


def open_shards(paths: Iterable[str]) -> Dataset:
    """The samples of shards, whatever the width of their latents."""
    paths = list(paths)
    channels = (index.channels for index in map(load_index, paths) if len(index))
    return open_dataset(paths, next(channels, 128))


def write_shard(
    source: str, target: str, split: str, audio: str, codec: str, device: str
) -> dict[str, Any]:
    """{"left_out": names of private columns}. `audio`: suffix of the recordings that `codec` decodes; "" for Parquet."""
    left_out = set[str]()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    dataset = open_shards([source])
    if audio:
        _write_audio(target, dataset, split, audio, _codec(codec, device), left_out)
    else:
        write_parquet(target, _rows(dataset, left_out))
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


def _rows(dataset: Dataset, left_out: set[str]) -> Iterator[dict[str, Any]]:
    """The columns of each sample. `left_out`: gets the names of private columns."""
    for sample in range(len(dataset)):
        *arrays, metadata = map(bytes, dataset.stored(sample))
        public = _public(json.loads(metadata), left_out)
        row: dict[str, Any] = {"key": dataset.key(sample)}
        for array, data in zip(members.ARRAYS, arrays, strict=True):
            row[array.length] = int(getattr(dataset, array.length)[sample])
            row[array.name] = data if row[array.length] else b""
        yield row | {"metadata": json.dumps(public, ensure_ascii=False, sort_keys=True)}


# A process's codec: its weights are loaded once, not for each shard.
_codec = lru_cache(maxsize=1)(build_codec)


def _write_audio(
    target: str, dataset: Dataset, split: str, audio: str, codec: Codec, left_out: set[str]
) -> None:
    bit_rate = _MP3_BIT_RATE if audio == "mp3" else 0
    of_references = {"reference_key", "reference_keys", members.REFERENCE_PARTS}
    with (
        one_thread(),
        atomic_file(target) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for sample in range(len(dataset)):
            loaded, key = dataset.load(sample), dataset.key(sample)
            public = _public(loaded.metadata, left_out) | ({"split": split} if split else {})
            told = {name: value for name, value in public.items() if name not in of_references}
            waveform = _waveform(codec, loaded.latents, told)
            add_member(tar, f"{key}.{audio}", encoded(waveform, codec.sample_rate, audio, bit_rate))
            add_member(tar, f"{key}.json", members.canonical_json(told))


def _public(metadata: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Without the hashes, and without private columns, whose names are added to `left_out`: who annotated the sample,
    where files lie on a machine, or how to log in to a store."""

    def is_private(name: str, value: Any) -> bool:
        if name in ("text", members.VERBATIM):
            return False
        return (
            name == "annotator"
            or without_secrets(value) != value
            or bool(_ABSOLUTE_PATH.search(json.dumps(value)))
        )

    private = {name for name, value in metadata.items() if is_private(name, value)}
    left_out |= private
    hidden = private | {members.HASHES_KEY}
    return {name: value for name, value in metadata.items() if name not in hidden}


def _waveform(codec: Codec, latents: np.ndarray, metadata: dict[str, Any]) -> torch.Tensor:
    """(samples,) of latents (T, C), without the padding of the last frame."""
    waveform = codec.decode(torch.from_numpy(latents)).cpu()
    samples = round(float(metadata.get("target_duration") or 0) * codec.sample_rate)
    is_of_last = 0 <= len(waveform) - samples < codec.hop_length
    return waveform[:samples] if is_of_last else waveform
