"""Read a corpus of recordings: one tar in the audio-WebDataset layout.

Two members a recording: KEY.opus (or .ogg, .flac, .wav) with one channel, and KEY.json with at least
"text" and "speaker"; "split" ("train" when absent), "language", "license" and anything else ride
along. assets/spoken_digits/spoken_digits.tar is one.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.dit_tts.errors import InputError

AUDIO_SUFFIXES = ("opus", "ogg", "flac", "wav")


@dataclass(frozen=True)
class Utterance:
    """One recording with what is known about it."""

    key: str
    waveform: Tensor  # (samples,) float32 in [-1, 1]
    sample_rate: int  # Hz
    text: str
    speaker: str
    split: str  # "train" or "heldout"
    metadata: dict[str, Any]  # the whole JSON


def read_audio_corpus(path: str | Path) -> Iterator[Utterance]:
    """Yield the recordings of a corpus tar in their order, one in memory at a time.

    The two members of a recording may stand in any order and need not be neighbours. A damaged,
    truncated or incomplete tar is an InputError, at the latest after the last recording.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"{path}: no such corpus file; give the path of a tar of KEY.opus + KEY.json"
        )
    waiting: dict[str, dict[str, bytes]] = {}
    yielded: set[str] = set()
    with open(path, "rb") as file:
        for name, data in _members(file, path):
            key, _, suffix = name.rpartition(".")
            if suffix != "json" and suffix not in AUDIO_SUFFIXES:
                raise InputError(
                    f"{path}: member {name} is neither .json nor audio ({', '.join(AUDIO_SUFFIXES)}); remove it"
                )
            kind = "json" if suffix == "json" else "audio"
            if key in yielded or kind in waiting.get(key, {}):
                raise InputError(
                    f"{path}: more than one {kind} member for key {key}; make the keys unique"
                )
            waiting.setdefault(key, {})[kind] = data
            if len(waiting[key]) == 2:
                parts = waiting.pop(key)
                yielded.add(key)
                yield _utterance(path, key, parts["audio"], parts["json"])
    if waiting:
        key, parts = next(iter(waiting.items()))
        missing = "KEY.json" if "audio" in parts else "an audio member"
        raise InputError(
            f"{path}: {len(waiting)} recordings are incomplete, the first is {key}, which lacks {missing}; "
            "make the tar again"
        )
    if not yielded:
        raise InputError(
            f"{path}: the tar holds no recording; expected pairs of KEY.opus and KEY.json"
        )


def count_recordings(path: str | Path) -> int:
    """Number of KEY.json members, from the tar's headers alone; for a progress bar, checks nothing."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            return sum(member.name.endswith(".json") for member in tar)
    except tarfile.TarError:
        return 0  # read_audio_corpus says what is wrong


def _members(file: io.BufferedReader, path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every regular file in the tar, refusing damage that tarfile passes over."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                data = tar.extractfile(member).read()  # type: ignore[union-attr]
                if len(data) != member.size:
                    raise InputError(
                        f"{path}: the tar is cut off inside member {member.name}; copy it again"
                    )
                yield member.name, data
            # tarfile takes a damaged header for the end of the archive (cpython 120740): a sound tar
            # has at least one block of zeros there, and nothing else behind.
            file.seek(tar.offset)
            rest = file.read()
    except tarfile.TarError as error:
        raise InputError(f"{path}: not a readable tar ({error}); copy or make it again") from error
    if not rest.strip(b"\0") and len(rest) >= tarfile.BLOCKSIZE:
        return
    raise InputError(
        f"{path}: the tar is damaged or cut off near byte {tar.offset} (no end mark there); copy it again"
    )


def _utterance(path: Path, key: str, audio: bytes, metadata_json: bytes) -> Utterance:
    """Decode one recording and check what the rest relies on."""
    try:
        import soundfile
    except ImportError as error:
        raise ImportError("reading recordings needs soundfile: pip install soundfile") from error
    try:
        metadata = json.loads(metadata_json)
    except ValueError as error:
        raise InputError(
            f"{path}: {key}.json is not JSON ({error}); write an object with text and speaker"
        ) from error
    for field in ("text", "speaker"):
        value = metadata.get(field) if isinstance(metadata, dict) else None
        if not isinstance(value, str) or not value.strip():
            raise InputError(
                f'{path}: {key}.json has "{field}" = {value!r}; a non-empty string is needed'
            )
    split = metadata.get("split", "train")
    if split not in ("train", "heldout"):
        raise InputError(
            f'{path}: {key}.json has "split" = {split!r}; allowed are "train" and "heldout"'
        )
    try:
        samples, sample_rate = soundfile.read(io.BytesIO(audio), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise InputError(
            f"{path}: the audio of {key} cannot be decoded ({error}); replace it"
        ) from error
    if samples.shape[1] != 1 or samples.shape[0] == 0:
        raise InputError(
            f"{path}: the audio of {key} has {samples.shape[0]} samples in {samples.shape[1]} channels; "
            "one channel with at least one sample is needed"
        )
    return Utterance(
        key=key,
        waveform=torch.from_numpy(samples[:, 0].copy()),
        sample_rate=sample_rate,
        text=metadata["text"],
        speaker=metadata["speaker"],
        split=split,
        metadata=metadata,
    )
