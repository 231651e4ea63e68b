"""Stage 2: encoded chunks to shards of triplets. Each shard is a pure function of the work folder."""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.chunk_file import (
    EncodedSample,
    chunk_path,
    read_frames,
    read_header,
)
from torchtitan.models.dit_tts.prepare.encode import read_run
from torchtitan.models.dit_tts.prepare.references import SampleTable, choose_references
from torchtitan.models.dit_tts.prepare.work_folder import cannot_write

TABLE_NAME = "table"


def shard_name(split: str, number: int) -> str:
    """A shard's path in the output."""
    return f"{split}/shard-{number:06d}.tar"


def build_shard(folder: str, split: str, number: int, device: str = "") -> dict[str, Any]:
    """Write a shard and its index, or keep the one that an earlier run wrote.

    Called by name in processes of every engine; `device` is not used.

    Returns:
        {"name", "bytes", "sha256", "samples", "frames"}; or {"error": sentence}.
    """
    run = read_run(Path(folder))
    table = _table(folder, run.token)
    size = run.settings.samples_per_shard
    samples = table.in_split(split)[number * size : (number + 1) * size]
    path = Path(folder, shard_name(split, number))
    try:
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_shard(path, _triplets(Path(folder), table, samples))
        index = load_index(str(path))
        if index.problems or len(index) != len(samples):
            return {
                "error": f"{path}: holds {len(index)} sound samples of {len(samples)}; remove it and "
                "start again, it will be made anew"
            }
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except InputError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": cannot_write(folder, error)}
    return {
        "name": shard_name(split, number),
        "bytes": path.stat().st_size,
        "sha256": digest,
        "samples": len(samples),
        "frames": int(table.columns["frames"][samples].sum(dtype=np.int64)),
    }


@lru_cache(maxsize=1)
def _table(folder: str, token: str) -> SampleTable:
    """A process's table, mapped once for all its shards of one run."""
    return SampleTable.open(Path(folder, TABLE_NAME))


def _triplets(folder: Path, table: SampleTable, samples: np.ndarray) -> Iterator[Triplet]:
    """The triplets of a shard, one in memory at a time."""
    run = read_run(folder)
    settings, columns = run.settings, table.columns
    chunk, encoded = -1, {}

    def frames(sample: int, start: int, count: int) -> np.ndarray:
        number = int(columns["chunk"][sample])
        first = int(columns["start"][sample]) + start
        path = chunk_path(folder, number)
        return read_frames(path, int(table.data_offset[number]), first, count, run.channels)

    for sample in map(int, samples):
        if columns["chunk"][sample] != chunk:
            chunk = int(columns["chunk"][sample])
            encoded = _samples_by_key(chunk_path(folder, chunk))
        key = table.key(sample)
        count, given = int(columns["frames"][sample]), int(columns["given_frames"][sample])
        metadata = dict(encoded[key].metadata)
        if given:
            # The source's own reference, cropped as the others are, but from its start on.
            reference = frames(sample, count, min(given, settings.max_reference_frames))
        else:
            spans = choose_references(
                table, sample, settings.seed, settings.references, settings.max_reference_frames
            )
            reference = np.concatenate([frames(s.sample, s.start, s.frames) for s in spans])
            metadata["reference_key"] = table.key(spans[0].sample)
            if settings.references > 1:
                metadata["reference_keys"] = [table.key(span.sample) for span in spans]
        yield Triplet(key, frames(sample, 0, count), reference, metadata)


def _samples_by_key(path: Path) -> dict[str, EncodedSample]:
    header, _ = read_header(path)
    return {sample.key: sample for sample in header.samples}
