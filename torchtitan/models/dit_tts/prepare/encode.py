"""Stage 1: one chunk of recordings to one file of latents. A pure function of the work folder.

`encode_chunk` is called by name in processes of every engine, so that all arguments are plain values.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan.models.dit_tts.codec import Codec, build_codec
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.audio_reader import Loader, ReadyLatents, Recording
from torchtitan.models.dit_tts.prepare.chunk_file import (
    ChunkHeader,
    EncodedSample,
    chunk_path,
    write_chunk,
)
from torchtitan.models.dit_tts.prepare.listing import chunk_items
from torchtitan.models.dit_tts.prepare.processing import Processed, length_reason, process
from torchtitan.models.dit_tts.prepare.recordings import Item
from torchtitan.models.dit_tts.prepare.settings import PrepareSettings
from torchtitan.models.dit_tts.prepare.work_folder import cannot_write

RUN_NAME = "run.json"
# Bounds the memory of a batch; at 48 kHz a tenth of a gigabyte of input.
MAX_BATCH_SECONDS = 480.0


@dataclass(frozen=True)
class Run:
    """What workers need to know beside the plan."""

    root: str  # absolute folder of the source, as it is now
    source: str  # as the user gave it, for messages
    on_error: str
    channels: int
    sample_rate: int
    hop_length: int
    settings: PrepareSettings
    token: str  # another one each time that a preparation starts or goes on

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_run(folder: Path) -> Run:
    values = json.loads((folder / RUN_NAME).read_text())
    return Run(**values | {"settings": PrepareSettings.from_json(values["settings"])})


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: a worker a core, and sums in the same order everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _codec(name: str, device: str) -> Codec:
    """A process's codec: its weights are loaded once, not for each chunk."""
    return build_codec(name, device)


@lru_cache(maxsize=1)
def _loader(root: str, token: str) -> Loader:
    """A process's open source: a table's cursor goes on where the last chunk left it."""
    return Loader(root)


def encode_chunk(folder: str, number: int, device: str) -> dict[str, Any]:
    """Encode the recordings of a chunk into its file.

    Returns:
        {"items": n, "problems": [[key, sentence]]}, or {"error": sentence} where the user has to
        mend something.
    """
    run = read_run(Path(folder))
    items = chunk_items(Path(folder), number)
    try:
        with one_thread():
            header, latents = _encode(run, items, device)
    except InputError as error:
        return {"error": str(error)}
    try:
        write_chunk(chunk_path(Path(folder), number), header, latents)
    except OSError as error:
        return {"error": cannot_write(folder, error)}
    return {"items": len(items), "problems": header.problems}


def _encode(run: Run, items: list[Item], device: str) -> tuple[ChunkHeader, np.ndarray]:
    header = ChunkHeader(run.channels)
    digest = hashlib.sha256()  # as `digest_items` makes it
    kept: list[tuple[Item, Processed | ReadyLatents]] = []
    loader = _loader(run.root, run.token)
    for item in items:
        digest.update(item.content())
        try:
            loaded = loader.load(item.audio, run.channels)
        except InputError as error:
            if run.on_error == "raise":
                raise InputError(
                    f"{run.source}: {item.key}: {error}; mend it, or leave such recordings out with "
                    "--on-error skip"
                ) from None
            outcome: Processed | ReadyLatents | str = "undecodable"
            header.problems.append([item.key, str(error)])
            digest.update(content_digest(loader, item, run.channels))
        else:
            digest.update(loaded.digest)
            outcome = _outcome(run, item, loaded)
        if isinstance(outcome, str):
            header.dropped[outcome] = header.dropped.get(outcome, 0) + 1
        else:
            kept.append((item, outcome))
    header.digest = digest.hexdigest()
    return header, _latents(run, kept, header, device)


def digest_items(items: list[Item], loader: Loader, channels: int) -> str:
    """The digest of a chunk's contents: texts, metadata and the bytes of the audio."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(item.content())
        digest.update(content_digest(loader, item, channels))
    return digest.hexdigest()


def content_digest(loader: Loader, item: Item, channels: int) -> bytes:
    """Of an item's audio; of what cannot be read, nothing."""
    try:
        return loader.digest(item.audio, channels)
    except InputError:
        return b""


def _outcome(
    run: Run, item: Item, loaded: Recording | ReadyLatents
) -> Processed | ReadyLatents | str:
    settings = run.settings.audio
    if isinstance(loaded, Recording):
        return process(loaded.samples, loaded.rate, run.sample_rate, item.text, settings)
    seconds = len(loaded.latents) * run.hop_length / run.sample_rate
    return length_reason(seconds, item.text, settings) or loaded


def _latents(
    run: Run,
    kept: list[tuple[Item, Processed | ReadyLatents]],
    header: ChunkHeader,
    device: str,
) -> np.ndarray:
    """All latents (frames, channels) float16 of a chunk; describes them in `header`."""
    waveforms = [one.waveform if isinstance(one, Processed) else None for _, one in kept]
    encoded = _encode_waveforms(run, waveforms, device)
    arrays: list[np.ndarray] = []
    start = 0
    for (item, one), latents in zip(kept, encoded, strict=True):
        metadata, reference = dict(item.metadata), 0
        if isinstance(one, ReadyLatents):
            latents, reference = one.latents.astype(np.float16), len(one.reference)
            metadata["target_duration"] = _duration(
                metadata.get("target_duration"), len(latents), run.sample_rate / run.hop_length
            )
            arrays += [latents, one.reference.astype(np.float16)]
        else:
            metadata["target_duration"] = one.seconds
            if one.gain_db is not None:
                metadata["gain_db"] = one.gain_db
            arrays.append(latents)
            _count(header.counts, one)
        header.samples.append(
            EncodedSample(
                item.key, item.speaker, item.split, start, len(latents), reference, metadata
            )
        )
        start += len(latents) + reference
    return np.concatenate(arrays) if arrays else np.zeros((0, run.channels), np.float16)


def _duration(given: Any, frames: int, frames_per_second: float) -> float:
    """Seconds of ready latents: the source's figure where it fits them."""
    if isinstance(given, (int, float)) and abs(given * frames_per_second - frames) <= 1:
        return given
    return frames / frames_per_second


def _count(counts: dict[str, float], one: Processed) -> None:
    for name in ("peak_limited", "mixed_channels", "resampled", "silence_cut_seconds"):
        value = getattr(one, name)
        if value:
            counts[name] = counts.get(name, 0) + value


def _encode_waveforms(
    run: Run, waveforms: list[np.ndarray | None], device: str
) -> list[np.ndarray | None]:
    """Latents (T, channels) float16 of each waveform, those of equal length in frames together.

    Each are the codec's `encode` of it, also where its end lies between two frames.
    """
    groups: dict[int, list[int]] = {}
    for index, waveform in enumerate(waveforms):
        if waveform is not None:
            groups.setdefault(-(-len(waveform) // run.hop_length), []).append(index)
    out: list[np.ndarray | None] = [None] * len(waveforms)
    for frames, members in groups.items():
        codec = _codec(run.settings.codec, device)
        size = max(1, int(MAX_BATCH_SECONDS * run.sample_rate) // (frames * run.hop_length))
        for first in range(0, len(members), size):
            part = members[first : first + size]
            batch = torch.stack(
                [codec.to_whole_frames(torch.from_numpy(waveforms[index])) for index in part]
            )
            latents = codec.encode_batch(batch).cpu().numpy().astype(np.float16)
            for row, index in enumerate(part):
                if not np.isfinite(latents[row]).all():
                    raise InputError(
                        f"{run.source}: codec '{run.settings.codec}' gave latents that are not "
                        "finite in float16; take another codec or device"
                    )
                out[index] = latents[row]
    return out
