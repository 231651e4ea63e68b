"""How well a run's speech can be read: word error rates beside those of what it could at best reach."""

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

import torch

from torchtitan.models.dit_tts.codec import Codec
from torchtitan.models.dit_tts.data.archive import Dataset
from torchtitan.models.dit_tts.flow.guidance import Guidance
from torchtitan.models.dit_tts.inference.duration import DurationFit
from torchtitan.models.dit_tts.inference.load_run import LoadedRun
from torchtitan.models.dit_tts.inference.recognizer import KeywordRecognizer, word_errors
from torchtitan.models.dit_tts.inference.sampler import SpeechRequest, generate_latents
from torchtitan.models.dit_tts.model.model import DiTTTSModel

_BATCH = 16


@dataclass
class HeldOut:
    """One held-out utterance of an archive."""

    key: str
    text: str
    speaker: str
    latents: torch.Tensor
    """(T, C) of the recording"""

    reference: torch.Tensor
    """(R, C) of another utterance by the speaker"""


@dataclass
class WordErrors:
    """Word errors and words of one kind of audio, by speaker."""

    errors: dict[str, int] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)

    def add(self, speaker: str, reference: list[str], hypothesis: list[str]) -> None:
        self.errors[speaker] = self.errors.get(speaker, 0) + word_errors(reference, hypothesis)
        self.words[speaker] = self.words.get(speaker, 0) + len(reference)

    def rates(self) -> dict[str, float]:
        """Word error rate of each speaker and, as "all", over all words."""
        rates = {s: self.errors[s] / self.words[s] for s in sorted(self.words)}
        return {**rates, "all": sum(self.errors.values()) / sum(self.words.values())}


def read_heldout(dataset: Dataset, max_speaker_frames: int) -> list[HeldOut]:
    items = []
    for index in range(len(dataset)):
        latents, reference = dataset.read(index)
        metadata = dataset.metadata(index)
        items.append(
            HeldOut(
                key=dataset.sample_id(index).split(":", 1)[1],
                text=metadata["text"],
                speaker=str(metadata.get("speaker", "")),
                latents=torch.from_numpy(latents),
                reference=torch.from_numpy(reference[:max_speaker_frames]),
            )
        )
    return items


def speak(
    run: LoadedRun,
    model: DiTTTSModel,
    codec: Codec,
    items: list[HeldOut],
    durations: DurationFit,
    guidance: Guidance,
    steps: int,
    seed: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> list[torch.Tensor]:
    """Waveforms of the items' texts in their speakers' voices, with fitted lengths."""
    waveforms = []
    starts = range(0, len(items), _BATCH)
    for start in progress(starts):
        requests = [
            SpeechRequest(item.text, item.reference, durations.frames(item.text, item.speaker))
            for item in items[start : start + _BATCH]
        ]
        latents = generate_latents(
            model,
            run.tokenizer,
            run.objective,
            requests,
            guidance,
            steps,
            seed + start,
            run.device,
        )
        waveforms += [codec.decode(row) for row in latents]
    return waveforms


def listen(
    recognizer: KeywordRecognizer,
    items: list[HeldOut],
    waveforms: list[torch.Tensor],
    sample_rate: int,
) -> tuple[WordErrors, list[list[str]]]:
    """Word errors of the waveforms against the items' texts, and what was heard."""
    errors, heard = WordErrors(), []
    for item, waveform in zip(items, waveforms, strict=True):
        heard.append(recognizer.transcribe(waveform, sample_rate))
        errors.add(item.speaker, item.text.split(), heard[-1])
    return errors, heard
