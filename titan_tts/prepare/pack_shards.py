"""Stage 2: encoded chunks to shards of triplets. Each shard is a pure function of the work folder."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_tts.prepare.captions import Thirds, caption
from titan_tts.prepare.encode import MEASURED, Run, lacks_caption, open_chunks, read_run
from titan_tts.prepare.settings import Options
from titan_tts.records.utterance import TRAIN
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.data.leak import is_leak
from torchtitan.models.dit_tts.data.references import WORDS, DrawnReferences
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import InputError

# To draw a reference, where all recordings of a speaker overlap.
_MAX_ATTEMPTS = 16


class Encoded(NamedTuple):
    """The encoded samples, and the utterances that their references are drawn from."""

    chunks: Dataset
    is_training: np.ndarray  # (n,) bool
    of_split: dict[bool, DrawnReferences]
    of_all: DrawnReferences


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
        encoded = _opened(folder, run)
        size = run.options.samples_per_shard
        of_split = np.flatnonzero(encoded.is_training == (split == TRAIN))
        samples = of_split[number * size : (number + 1) * size]
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_shard(path, _triplets(run.options, encoded, samples, json.loads(relative_to)))
        index = load_index(str(path))
    except CorruptSampleError as error:
        raise InputError(f"{error}; remove {folder} and start again") from error
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "bytes": path.stat().st_size,
        "sha256": digest,
        "samples": len(samples),
        "frames": int(encoded.chunks.frames[samples].sum(dtype=np.int64)),
        "without_reference": int((index.columns["reference_frames"] == 0).sum()),
    }


@lru_cache(maxsize=1)
def _opened(folder: str, run: Run) -> Encoded:
    """Opened once per process."""
    chunks = open_chunks(Path(folder), run.channels, part=(1, 2))  # the pipeline has the bar
    splits = np.array([Path(path).parent.name for path in chunks.tar_paths])[chunks.shard]
    is_training, every = splits == TRAIN, np.arange(len(chunks))
    columns = chunks.labels("speaker")[0], chunks.frames, chunks.latents_hash
    of_split = {
        side: DrawnReferences(every[is_training == side], *columns) for side in (False, True)
    }
    return Encoded(chunks, is_training, of_split, DrawnReferences(every, *columns))


def _triplets(
    options: Options, encoded: Encoded, samples: np.ndarray, relative_to: Thirds
) -> Iterator[Triplet]:
    """The triplets of a shard, one in memory at a time."""
    chunks = encoded.chunks
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
            if drawn := _drawn(options, encoded, sample, loaded.latents):
                metadata["reference_key"], reference = drawn
        others = {each.name: array for each, array in zip(members.ARRAYS[2:], loaded.arrays[2:])}
        yield Triplet(key, loaded.latents, reference, metadata, others)


def _drawn(
    options: Options, encoded: Encoded, sample: int, latents: np.ndarray
) -> tuple[str, np.ndarray] | None:
    """Key and frames of a sample's reference: another utterance of the speaker, cropped from a random frame on, which shares
    no frames with the sample, as overlapping segments do, and is not the same throughout. Training samples get
    training utterances, held-out ones held-out utterances or else training ones. It depends on (seed, key) and the
    speaker's utterances alone. `--references 0`: none."""
    chunks, is_training = encoded.chunks, bool(encoded.is_training[sample])
    digest = hashlib.sha256(chunks.key(sample).encode()).digest()
    random = np.random.default_rng([options.seed, int.from_bytes(digest[:8], "little")])
    sources = [encoded.of_split[is_training], *([] if is_training else [encoded.of_all])]
    for source in sources if options.references else ():
        for _ in range(_MAX_ATTEMPTS):
            words = random.integers(2**63, size=WORDS).tolist()
            piece = source.draw_one(words, sample, options.max_reference_frames)
            if piece is None:
                break
            frames = chunks.load(piece.sample).latents[piece.start :][: piece.frames]
            changes = len(frames) == 1 or bool((frames != frames[0]).any())
            if changes and not is_leak(frames, latents):
                return chunks.key(piece.sample), frames
    return None
