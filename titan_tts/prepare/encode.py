"""Stage 1: one chunk of recordings to shards of latents. A pure function of the work folder.

    chunks/train/00000012.tar     its training samples, references as far as the source gave any
    chunks/heldout/00000012.tar   its held-out samples
    chunks/00000012.json          its counts; written last: with it the chunk is complete

`encode_chunk` is called by name in processes of every engine, so all arguments are plain values.
"""

import json
import uuid
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_tts.prepare.audio_reader import Loader, ReadyLatents, Recording
from titan_tts.prepare.captions import voice_figures
from titan_tts.prepare.formats import SourceError
from titan_tts.prepare.listing import add_names, items_of_chunk, unusable
from titan_tts.prepare.processing import (
    REASONS,
    clipped_fraction,
    length_reason,
    loudness,
    process,
)
from titan_tts.prepare.settings import AudioSettings, Options
from titan_tts.records.utterance import SPLITS, Utterance
from torchtitan.models.dit_tts.data.dataset import Dataset, open_dataset
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.data.leak import is_leak
from torchtitan.models.dit_tts.data.members import CAPTION, REFERENCE_PARTS
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.infra.collectives import one_thread
from torchtitan.models.dit_tts.speech.audio import MAX_SECONDS, TooLong
from torchtitan.models.dit_tts.speech.codec import build_codec

MEASURED = "measured"
"""in the JSON of a sample of a chunk: figures for its caption"""


@dataclass(frozen=True)
class Run:
    """The facts that workers need in addition to the list."""

    root: str  # of the source's reader, as are the files
    files: dict[str, str] = field(hash=False)  # URLs have this start's signatures
    channels: int
    sample_rate: int
    hop_length: int
    options: Options
    # New each time that a preparation starts or continues.
    token: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class Chunk:
    """Counts of a chunk."""

    samples: dict[str, int] = field(default_factory=dict)  # split -> samples
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> recordings
    problems: list[list[str]] = field(default_factory=list)  # [key, sentence] of undecodable ones
    dropped_seconds: dict[str, float] = field(default_factory=dict)  # of those that can be decoded
    measured: list[dict[str, Any]] = field(default_factory=list)  # figures for the captions
    dropped_names: dict[str, list[str]] = field(default_factory=dict)  # the first of each reason

    def add(self, other: "Chunk") -> None:
        for name in ("samples", "dropped", "dropped_seconds"):
            sums = getattr(self, name)
            for key, value in getattr(other, name).items():
                sums[key] = sums.get(key, 0) + value
        self.problems += other.problems
        self.measured += other.measured
        add_names(self.dropped_names, other.dropped_names)


def write_run(folder: Path, run: Run) -> None:
    write_atomic(folder / "run.json", json.dumps(asdict(run)))


def read_run(folder: Path) -> Run:
    values = json.loads((folder / "run.json").read_text())
    return Run(**values | {"options": Options.from_json(values["options"])})


def read_chunk(folder: Path, number: int) -> Chunk | None:
    """A chunk's counts; None where it is not encoded."""
    path = _chunk_path(folder, number)
    if not path.exists():
        return None
    chunk = Chunk(**json.loads(path.read_text()))
    there = all(_shard_path(folder, split, number).exists() for split in chunk.samples)
    return chunk if there else None


def open_chunks(folder: Path, channels: int, part: tuple[int, int] = (0, 1)) -> Dataset:
    """All encoded samples: the training ones in the order of the list, then the others."""
    folders = [folder / "chunks" / split for split in SPLITS]
    paths = [str(path) for path in folders if path.is_dir() and any(path.glob("*.tar"))]
    try:
        return open_dataset(paths, channels, part=part)
    except InputError as error:
        raise InputError(f"{error}; remove {folder} and start again") from None


def _chunk_path(folder: Path, number: int) -> Path:
    return folder / "chunks" / f"{number:08d}.json"


def _shard_path(folder: Path, split: str, number: int) -> Path:
    return folder / "chunks" / split / f"{number:08d}.tar"


# A process's codec: its weights are loaded once, not for each chunk.
_codec = lru_cache(maxsize=1)(build_codec)


@lru_cache(maxsize=1)
def _loader(run: Run) -> Loader:
    """A process's open source: a table's cursor goes on where the last chunk left it."""
    return Loader(run.root, run.files, max(MAX_SECONDS, run.options.audio.max_seconds or 0))


def encode_chunk(folder: str, number: int, device: str) -> dict[str, Any]:
    """Encode a chunk: {"chunk": its Chunk as a dict}."""
    work = Path(folder)
    run = read_run(work)
    with one_thread():  # one worker per core, and sums in the same order everywhere
        chunk, samples = _encode(run, items_of_chunk(work, number), device)
    for split, triplets in samples.items():
        path = _shard_path(work, split, number)
        path.unlink(missing_ok=True)  # of an earlier attempt, that may have dropped others
        if triplets:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_shard(path, triplets)
            load_index(str(path))  # here, where it runs in parallel
    write_atomic(_chunk_path(work, number), json.dumps(asdict(chunk)))
    return {"chunk": asdict(chunk)}


def _encode(
    run: Run, items: list[Utterance], device: str
) -> tuple[Chunk, dict[str, list[Triplet]]]:
    chunk, loader = Chunk(), _loader(run)
    samples: dict[str, list[Triplet]] = {split: [] for split in SPLITS}
    for item in items:
        seconds = 0.0
        try:
            loaded = loader.load(item.audio, run.channels)
            if isinstance(loaded, Recording):
                seconds = len(loaded.samples) / loaded.rate
                made = _of_recording(run, item, loaded, loader.references(item), device)
            else:
                seconds = len(loaded.latents) * run.hop_length / run.sample_rate
                made = _of_latents(run, item, loaded, seconds)
        except SourceError:
            raise
        except InputError as error:
            most = run.options.audio.max_seconds
            if isinstance(error, TooLong) and not seconds and most and error.seconds >= most:
                made, seconds = "too_long", error.seconds
            else:
                if run.options.on_error == "raise":
                    raise unusable(run.options.source, item.id, error) from None
                chunk.problems.append([item.id, str(error)])
                made = "undecodable"
        if isinstance(made, str):
            names = {made: [item.id]}
            chunk.add(
                Chunk(dropped={made: 1}, dropped_seconds={made: seconds}, dropped_names=names)
            )
        else:
            samples[item.split].append(made)
            if lacks_caption(run.options, made.metadata):
                chunk.measured.append(made.metadata[MEASURED])
    chunk.samples = {split: len(triplets) for split, triplets in samples.items() if triplets}
    return chunk, samples


def _of_recording(
    run: Run, item: Utterance, loaded: Recording, references: list[Recording], device: str
) -> Triplet | str:
    """The sample, or the reason to leave it out."""
    audio, labels = run.options.audio, dict(item.labels)
    done = process(loaded.samples, loaded.rate, run.sample_rate, item.text, audio)
    # No filters for references: the user chose these recordings.
    settings = AudioSettings(loudness=audio.loudness, max_silence=audio.max_silence)
    # Each has an equal part, so that no speaker of several is lost.
    frames = max(1, run.options.max_reference_frames // max(1, len(references)))
    parts = [np.zeros((0, run.channels), np.float16)]
    for each in references:
        said = process(each.samples, each.rate, run.sample_rate, "", settings)
        if isinstance(said, str):
            raise InputError(f"a recording of its reference is {REASONS[said]}; replace it")
        parts.append(_latents(run, said.waveform[: frames * run.hop_length], device))
    if isinstance(done, str):
        return done
    labels["target_duration"] = done.seconds
    if done.gain_db is not None:
        labels["gain_db"] = done.gain_db
    if clipped := round(clipped_fraction(loaded.samples), 3):
        labels["clipped"] = clipped
    if len(references) > 1:
        labels[REFERENCE_PARTS] = [len(each) for each in parts[1:]]
    latents = _latents(run, done.waveform, device)
    labels |= _measured(run, labels, done.seconds, done.waveform)
    return Triplet(item.id, latents, np.concatenate(parts), labels)


def _of_latents(run: Run, item: Utterance, loaded: ReadyLatents, seconds: float) -> Triplet | str:
    if reason := length_reason(seconds, item.text, run.options.audio):
        return reason
    latents, reference, labels = loaded.latents, loaded.reference, dict(item.labels)
    # As they are stored.
    is_part = is_leak(
        *(each.astype(np.float16).astype(np.float32) for each in (reference, latents))
    )
    # The source's figure is kept where it fits the frames.
    duration, fps = labels.get("target_duration"), run.sample_rate / run.hop_length
    if not isinstance(duration, (int, float)) or abs(duration * fps - len(latents)) > 1:
        labels["target_duration"] = len(latents) / fps
    labels |= _measured(run, labels, seconds)
    return Triplet(item.id, latents, reference[:0] if is_part else reference, labels)


def lacks_caption(options: Options, labels: dict[str, Any]) -> bool:
    """True if a sample shall have a caption and has none."""
    return options.captions and not labels.get(CAPTION)


def _measured(
    run: Run, labels: dict[str, Any], seconds: float, waveform: np.ndarray | None = None
) -> dict[str, dict[str, Any]]:
    """{MEASURED: figures} of a sample that lacks a caption."""
    if not lacks_caption(run.options, labels):
        return {}
    figures: dict[str, Any] = {"chars_per_second": round(len(labels["text"]) / seconds, 2)}
    if waveform is not None:
        figures |= voice_figures(waveform, run.sample_rate)
        figures["loudness"] = round(
            loudness(waveform, run.sample_rate), 2
        )  # with --loudness all alike
    return {MEASURED: figures}


def _latents(run: Run, waveform: np.ndarray, device: str) -> np.ndarray:
    return _codec(run.options.codec, device).encode(torch.from_numpy(waveform)).cpu().numpy()
