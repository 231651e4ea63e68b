"""Held-out texts synthesized by a run, transcribed by a recognizer, and the word error rates."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from torchtitan.models.dit_tts.codec import Codec
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.flow.guidance import Guidance
from torchtitan.models.dit_tts.inference.load_run import LoadedRun
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.sampling.duration import LinearDurationModel
from torchtitan.models.dit_tts.sampling.sampler import SpeechRequest, generate_latents
from torchtitan.models.dit_tts.scoring import interface
from torchtitan.models.dit_tts.scoring.word_errors import count_errors
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, with_duration
from torchtitan.models.dit_tts.text.vocabulary import named

Sound = tuple[torch.Tensor, int]
"""a waveform (samples,) and its rate in Hz; a recording's need not be the codec's"""

_BATCH = 16
_SHOWN = 5


@dataclass
class HeldOut:
    """One held-out utterance."""

    key: str
    file_name: str
    """of its wav and spectrogram, without suffix"""

    text: str
    speaker: str
    latents: torch.Tensor
    """(T, C) of the recording"""

    reference: torch.Tensor
    """(R, C) of another utterance by the speaker"""

    metadata: dict[str, Any]
    """the sample's JSON, which has the values of its conditioning tokens"""


@dataclass
class WordErrors:
    """Word errors and words of one kind of audio, by speaker."""

    errors: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)

    def add(self, speaker: str, text: str, heard: str) -> None:
        counted = count_errors(text, heard)
        self.errors[speaker] += counted.word_errors
        self.words[speaker] += counted.words

    def rates(self) -> dict[str, float]:
        """Word error rate of each speaker and, as "all", over all words."""
        rates = {s: self.errors[s] / self.words[s] for s in sorted(self.words) if self.words[s]}
        words = self.words.total()
        return {**rates, "all": self.errors.total() / words} if words else rates


def read_heldout(dataset: Dataset, max_speaker_frames: int) -> list[HeldOut]:
    items = []
    names = [_file_name(dataset.key(index)) for index in range(len(dataset))]
    if len(set(names)) < len(names):  # keys are unique within a shard only
        names = [_file_name(dataset.sample_id(index)) for index in range(len(dataset))]
    fetched = dataset.fetch(range(len(dataset)))
    for index, name in enumerate(names):
        loaded = dataset.load(index, fetched=fetched.get(index))
        latents, reference, metadata = loaded.latents, loaded.reference, loaded.metadata
        item = HeldOut(
            key=dataset.key(index),
            file_name=name,
            text=metadata["text"],
            speaker=str(metadata.get("speaker", "")),
            latents=torch.from_numpy(latents),
            reference=torch.from_numpy(reference[:max_speaker_frames]),
            metadata=metadata,
        )
        items.append(item)
    return items


def _file_name(name: str) -> str:
    """A key, which may have slashes, as the name of a file."""
    return re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "_"


def untrained_tokens(items: list[HeldOut], tokenizer: ConditionedTokenizer) -> list[str]:
    """Characters and label values of the items that the run was not trained with, one line per kind."""
    characters = {c for item in items for c in tokenizer.unknown_characters(item.text)}
    kinds = {"characters": characters} if characters else {}
    for item in items:
        for name, value in tokenizer.unknown_values(item.metadata).items():
            kinds.setdefault(f"values of {name!r}", set()).add(value)
    return [
        f"{len(values)} {kind} that the run was not trained with ({named(sorted(values), _SHOWN)})"
        for kind, values in kinds.items()
    ]


def synthesize(
    run: LoadedRun,
    model: DiTTTSModel,
    codec: Codec,
    items: list[HeldOut],
    durations: LinearDurationModel,
    guidance: Guidance,
    steps: int,
    seed: int,
    label: str,
) -> list[torch.Tensor]:
    """Waveforms of the items' texts in their speakers' voices, with estimated lengths."""
    waveforms = []
    for start in tqdm(range(0, len(items), _BATCH), label, unit="batch"):
        requests = []
        for item in items[start : start + _BATCH]:
            frames = durations.frames(item.text, item.speaker)
            conditions = with_duration(item.metadata, frames, run.config.data.frames_per_second)
            requests.append(SpeechRequest(item.text, item.reference, frames, conditions))
        latents = generate_latents(
            model,
            run.tokenizer,
            run.objective,
            requests,
            guidance,
            steps,
            seed + start,
            run.device,
            run.text_encoder,
        )
        waveforms += [codec.decode(row) for row in latents]
    return waveforms


def transcribe(
    recognizer: interface.Recognizer, items: list[HeldOut], sounds: list[Sound]
) -> tuple[WordErrors, list[list[str]]]:
    """Word errors of the sounds against the items' texts, and the words that were recognized."""
    recognizer.check_texts([item.text for item in items])
    errors, heard = WordErrors(), []
    for item, (waveform, sample_rate) in zip(items, sounds, strict=True):
        heard.append(recognizer.transcribe(interface.Sound(waveform, sample_rate)).split())
        errors.add(item.speaker, item.text, " ".join(heard[-1]))
    return errors, heard
