"""Stage 2: encoded chunks to shards of triplets. Each shard is a pure function of the work folder."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.prepare.captions import Thirds, caption
from titan_tts.prepare.encode import MEASURED, Run, lacks_caption, open_chunks, read_run
from titan_tts.prepare.references import SpeakerTable, choose_reference
from titan_tts.prepare.settings import Options
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.data.leak import is_leak
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import InputError

# To draw a reference, where all recordings of a speaker overlap.
_MAX_ATTEMPTS = 16


def shard_name(split: str, number: int) -> str:
    """A shard's path in the output."""
    return f"{split}/shard-{number:06d}.tar"


def build_shard(
    folder: str, split: str, number: int, relative_to: str, device: str = ""
) -> dict[str, Any]:
    """Write a shard and its index, or keep the one that an earlier run wrote; returns its entry in the record. Called
    by name in processes of every engine; `relative_to` is the JSON of the captions' `Thirds`, `device` is not used."""
    run = read_run(Path(folder))
    path = Path(folder, shard_name(split, number))
    try:
        chunks, table = _opened(folder, run)
        size = run.options.samples_per_shard
        of_split = np.flatnonzero(table.train == (split == "train"))
        samples = of_split[number * size : (number + 1) * size]
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_shard(path, _triplets(run, chunks, table, samples, json.loads(relative_to)))
        index = load_index(str(path))
    except CorruptSampleError as error:
        raise InputError(f"{error}; remove {folder} and start again") from error
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "bytes": path.stat().st_size,
        "sha256": digest,
        "samples": len(samples),
        "frames": int(table.frames[samples].sum(dtype=np.int64)),
        "without_reference": int((index.columns["reference_frames"] == 0).sum()),
    }


@lru_cache(maxsize=1)
def _opened(folder: str, run: Run) -> tuple[Dataset, SpeakerTable]:
    """The encoded samples and their speakers, opened once per process."""
    chunks = open_chunks(Path(folder), run.channels, part=(1, 2))  # the pipeline has the bar
    splits = np.array([Path(path).parent.name for path in chunks.tar_paths])[chunks.shard]
    speakers = chunks.labels("speaker")[0]
    return chunks, SpeakerTable(speakers, splits == "train", chunks.frames)


def _triplets(
    run: Run, chunks: Dataset, table: SpeakerTable, samples: np.ndarray, relative_to: Thirds
) -> Iterator[Triplet]:
    """The triplets of a shard, one in memory at a time."""
    options = run.options
    for sample in map(int, samples):
        key, loaded = chunks.key(sample), chunks.load(sample)
        metadata = loaded.metadata
        if lacks_caption(options, metadata):
            metadata[members.CAPTION] = caption(metadata.pop(MEASURED), relative_to)
        if members.REFERENCE_PARTS in metadata and not options.references:
            raise InputError(
                f"--references 0, but the reference of '{key}' joins recordings of several speakers; give --references 1"
            )
        if len(loaded.reference) and options.references:
            # The source's own reference is cropped as the others are, but from its start on.
            reference = loaded.reference[: options.max_reference_frames]
        else:
            for name in ("reference_key", "reference_keys"):  # the source's name another reference
                metadata.pop(name, None)
            reference = loaded.reference[:0]
            if drawn := _drawn(options, chunks, table, sample, loaded.latents):
                metadata["reference_key"], reference = drawn
        others = {each.name: array for each, array in zip(members.ARRAYS[2:], loaded.arrays[2:])}
        yield Triplet(key, loaded.latents, reference, metadata, others)


def _drawn(
    options: Options, chunks: Dataset, table: SpeakerTable, sample: int, latents: np.ndarray
) -> tuple[str, np.ndarray] | None:
    """Key and frames of a sample's drawn reference, which shares no frames with the sample, as overlapping segments do,
    and is not the same throughout. `--references 0`: none."""
    for attempt in range(_MAX_ATTEMPTS if options.references else 0):
        span = choose_reference(
            table,
            sample,
            chunks.key(sample),
            seed=options.seed,
            max_frames=options.max_reference_frames,
            attempt=attempt,
        )
        if span is None:
            break
        frames = chunks.load(span.sample).latents[span.start :][: span.frames]
        changes = len(frames) == 1 or bool((frames != frames[0]).any())
        if changes and not is_leak(frames, latents):
            return chunks.key(span.sample), frames
    return None
