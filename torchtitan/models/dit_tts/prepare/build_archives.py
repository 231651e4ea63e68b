"""A corpus of recordings -> folders of training archives.

    prepare_corpus("assets/spoken_digits/spoken_digits.tar", "outputs/data/spoken_digits", codec)

makes, in one step or not at all:

    outputs/data/spoken_digits/
      prepare.json                  what it was made from; a second run compares it and does nothing
      train/shard-000000.tar ...    triplets, see data/shard_writer.py
      heldout/shard-000000.tar ...

The reference of a sample is another training utterance of the same speaker, drawn once by a seeded
generator: never the sample itself, and for a held-out sample never a held-out one, so that evaluating
needs nothing which training has not seen. The latents are kept in a scratch file between the two
passes (encode all; then draw and write), so the memory needed does not grow with the corpus.
"""

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.codec import Codec
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.audio_corpus import count_recordings, read_audio_corpus

MAX_REFERENCE_FRAMES = 384
RECORD_NAME = "prepare.json"
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Encoded:
    """Where an utterance's latents lie in the scratch file, and what goes into its JSON."""

    key: str
    speaker: str
    split: str
    start: int  # frames before it in the scratch file
    frames: int
    metadata: dict[str, Any]


def prepare_corpus(
    corpus_path: str | Path,
    output_folder: str | Path,
    codec: Codec,
    samples_per_shard: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Encode a corpus and write its archives; returns the summary that also stands in prepare.json.

    The summary counts samples, frames, hours and shards by split, the speakers, and
    "own_crop_references": samples whose speaker has no other training utterance. "reused" is true
    where the folder was complete already and nothing was done. The folder is replaced whole when the
    corpus, the codec or a setting differs; a folder that this function did not make is refused.
    """
    corpus_path, output_folder = Path(corpus_path), Path(output_folder).absolute()
    if samples_per_shard < 1:
        raise InputError(f"samples_per_shard is {samples_per_shard}; it must be at least 1")
    if not corpus_path.is_file():
        raise InputError(
            f"{corpus_path}: no such corpus file; give the path of a tar of recordings"
        )
    settings = {
        "corpus_bytes": corpus_path.stat().st_size,
        "corpus_sha256": _file_digest(corpus_path),
        "codec": codec.name,
        "codec_fingerprint": codec.fingerprint,
        "samples_per_shard": samples_per_shard,
        "seed": seed,
    }
    summary = _finished_summary(output_folder, settings)
    if summary is not None:
        return summary | {"reused": True}

    output_folder.parent.mkdir(parents=True, exist_ok=True)
    partial = output_folder.with_name(f".{output_folder.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        summary = _build(corpus_path, partial, codec, samples_per_shard, seed)
        record = {"settings": settings, "shards": _shard_sizes(partial), "summary": summary}
        with open(partial / RECORD_NAME, "w") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        _replace_folder(partial, output_folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary | {"reused": False}


def _build(
    corpus_path: Path, folder: Path, codec: Codec, samples_per_shard: int, seed: int
) -> dict[str, Any]:
    """Both passes into an empty folder; returns the summary."""
    scratch = folder / "latents.scratch"
    utterances = _encode_all(corpus_path, scratch, codec)
    latents = np.memmap(scratch, np.float16, mode="r").reshape(-1, codec.latent_channels)
    train_by_speaker: dict[str, list[int]] = {}
    for number, utterance in enumerate(utterances):
        if utterance.split == "train":
            train_by_speaker.setdefault(utterance.speaker, []).append(number)

    own_crops = 0
    summary: dict[str, Any] = {}
    for split in SPLITS:
        numbers = [number for number, one in enumerate(utterances) if one.split == split]
        if numbers:
            (folder / split).mkdir()
        for first in range(0, len(numbers), samples_per_shard):
            triplets = []
            for number in numbers[first : first + samples_per_shard]:
                triplet, own_crop = _triplet(number, utterances, latents, train_by_speaker, seed)
                triplets.append(triplet)
                own_crops += own_crop
            write_shard(folder / split / f"shard-{first // samples_per_shard:06d}.tar", triplets)
        frames = sum(utterances[number].frames for number in numbers)
        summary[split] = {
            "samples": len(numbers),
            "frames": frames,
            "hours": round(frames / codec.frames_per_second / 3600, 4),
            "shards": -(-len(numbers) // samples_per_shard),
        }
    del latents  # closes the map before its file goes
    scratch.unlink()
    summary["speakers"] = len({utterance.speaker for utterance in utterances})
    summary["own_crop_references"] = own_crops
    return summary


def _encode_all(corpus_path: Path, scratch: Path, codec: Codec) -> list[Encoded]:
    """Encode every recording, latents one after another into `scratch` as float16 (frames, 128)."""
    from tqdm import tqdm

    total = count_recordings(corpus_path)
    utterances: list[Encoded] = []
    position = 0
    progress = tqdm(
        read_audio_corpus(corpus_path), "encoding", total, unit="recording", mininterval=1.0
    )
    with open(scratch, "wb") as file:
        for utterance in progress:
            if utterance.sample_rate != codec.sample_rate:
                raise InputError(
                    f"{corpus_path}: recording {utterance.key} has {utterance.sample_rate} Hz, codec "
                    f"'{codec.name}' takes {codec.sample_rate} Hz; resample the corpus"
                )
            latents = codec.encode(utterance.waveform).numpy().astype(np.float16)
            file.write(latents.tobytes())
            seconds = len(utterance.waveform) / utterance.sample_rate
            metadata = utterance.metadata | {"target_duration": seconds}
            utterances.append(
                Encoded(
                    utterance.key,
                    utterance.speaker,
                    utterance.split,
                    position,
                    len(latents),
                    metadata,
                )
            )
            position += len(latents)
    if not any(utterance.split == "train" for utterance in utterances):
        raise InputError(
            f'{corpus_path}: no recording has "split" = "train"; training needs at least one'
        )
    return utterances


def _triplet(
    number: int,
    utterances: list[Encoded],
    latents: np.ndarray,
    train_by_speaker: dict[str, list[int]],
    seed: int,
) -> tuple[Triplet, bool]:
    """The sample `number` with its reference, and whether that had to be a crop of itself."""
    utterance = utterances[number]
    # Keyed by the sample, not drawn in a row: other samples' number or order does not change it.
    key_number = int.from_bytes(hashlib.sha256(utterance.key.encode()).digest()[:8], "little")
    random = np.random.default_rng([seed, key_number])
    others = [other for other in train_by_speaker.get(utterance.speaker, []) if other != number]
    own_crop = not others
    source = utterances[others[random.integers(len(others))]] if others else utterance
    # Half of itself at most: the whole would let a model copy its target from the reference.
    allowed = max(1, source.frames // 2) if own_crop else source.frames
    length = min(allowed, MAX_REFERENCE_FRAMES)
    start = source.start + int(random.integers(source.frames - length + 1))
    triplet = Triplet(
        key=utterance.key,
        latents=np.asarray(latents[utterance.start : utterance.start + utterance.frames]),
        reference=np.asarray(latents[start : start + length]),
        metadata=utterance.metadata | {"reference_key": source.key},
    )
    return triplet, own_crop


def _finished_summary(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of a complete folder made with the same settings, or None where it must be built."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
        wanted, shards, summary = record["settings"], record["shards"], record["summary"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder}: exists and has no readable {RECORD_NAME}, so it is not replaced; give another output "
            "folder or remove this one"
        ) from error
    complete = all(_size_or_none(folder / name) == size for name, size in shards.items())
    return summary if wanted == settings and complete else None


def _shard_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every shard, by its name relative to the folder."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.glob("*/*.tar"))
    }


def _size_or_none(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace_folder(new: Path, target: Path) -> None:
    """Put `new` in the place of `target`; a folder cannot be renamed over a full one in one call."""
    old = new.with_suffix(".old")
    if target.exists():
        target.rename(old)
    new.rename(target)
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
